"""The ClientApp of the installed package osfl."""

from client_app import app as client

app = client.app
