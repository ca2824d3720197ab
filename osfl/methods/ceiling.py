"""ceiling: the centralized upper bound, trained on all clients' images."""

from osfl.methods.declaration import Method

METHOD = Method(
    client=None,
    server="ceiling",
    payload=None,
    sends="nothing: the server holds all images itself, which no real server would",
    samples=False,
    numbers="none",
)
