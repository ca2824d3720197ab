"""Runs where the data is. Never imports `server_app`."""
