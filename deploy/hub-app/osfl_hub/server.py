"""The ServerApp of the installed package osfl."""

from server_app import app as server

app = server.app
