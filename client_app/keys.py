"""Which of the server's keys this site seals its payload to."""

from importlib.util import find_spec

from flwr.app import RecordDict

from osfl.config import ConfigError, NodeConfig
from osfl.payload.encryption import fingerprint, unpack_public_key
from osfl.util.text import plain


def sealing_key(content: RecordDict, node: NodeConfig, of_the_run: str = "") -> bytes | None:
    """The server's public key, 32 bytes, from its question; None: payloads go open.

    Args:
        of_the_run: the run-config's sealing-key; "": it has none.

    Raises:
        ConfigError: the site seals to another key, or the message lacks the key that the site or
            the run-config asks for.
        ValueError: what came is no key.
    """
    public = unpack_public_key(content)
    if public is not None and find_spec("pyhpke") is None:
        raise ConfigError(
            "sealing-key: to seal a payload this node needs the package pyhpke; install what "
            "osfl needs again"
        )
    if public is None and of_the_run:
        raise ConfigError(
            f"sealing-key = {plain(of_the_run, 200)!r}: the message lacks the server's "
            "public key, so the payload would go unsealed. It must carry the key; or set "
            'sealing-key = ""'
        )
    if not node.seal_to:
        return public
    if public is None:
        raise ConfigError(
            f"node-config seal-to = {node.seal_to!r}: this site sends no open payload, and the run "
            "has no sealing-key"
        )
    if fingerprint(public) != node.seal_to.lower():
        raise ConfigError(
            f"node-config seal-to = {node.seal_to!r}: the run's sealing-key has the fingerprint "
            f"{fingerprint(public)}"
        )
    return public
