"""The server, which runs on the machine with the GPU. Never imports `client_app`."""
