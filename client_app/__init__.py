"""The Flower ClientApp, which runs where the data is. Never imports `server_app`."""
