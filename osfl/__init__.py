"""OSFL: one-shot federated learning with diffusion models, on Flower.

This package holds the code that clients (`client_app`) and server (`server_app`) share. Only its
command line (`osfl/cli`) imports either of them.
"""

__version__ = "0.2.0"
