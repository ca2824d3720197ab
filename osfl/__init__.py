"""OSFL: one-shot federated learning with diffusion models, on Flower.

Code shared by the clients (`client_app`) and the server (`server_app`); it imports neither.
"""

__version__ = "0.2.0"
