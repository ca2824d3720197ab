"""Runs on the CUDA node. Never imports `client_app`."""
