"""Select the server's public key that this site encrypts its payload to."""

from importlib.util import find_spec

from flwr.app import RecordDict

from osfl.config import ConfigError, NodeConfig
from osfl.payload.encryption import fingerprint, unpack_public_key
from osfl.util.text import sanitize


def select_sealing_key(content: RecordDict, node: NodeConfig, run_key: str = "") -> bytes | None:
    """Return the server's public key (32 bytes) from its request, or None to send unencrypted.

    Args:
        run_key: the run-config's sealing-key; "" if it has none.

    Raises:
        ConfigError: the site pins another key, or the message lacks the key that the site or the
            run-config requires.
        ValueError: the message's key is malformed.
    """
    public = unpack_public_key(content)
    if public is not None and find_spec("pyhpke") is None:
        raise ConfigError(
            "sealing-key: encrypting a payload requires the package pyhpke; reinstall osfl's "
            "dependencies on this node"
        )
    if public is None and run_key:
        raise ConfigError(
            f"sealing-key = {sanitize(run_key, 200)!r}: the message lacks the server's "
            "public key, so the payload would be sent unencrypted. The message must contain the "
            'key; or set sealing-key = ""'
        )
    if not node.seal_to:
        return public
    if public is None:
        raise ConfigError(
            f"node-config seal-to = {node.seal_to!r}: this site sends no unencrypted payload, but "
            "the run has no sealing-key; set it"
        )
    if fingerprint(public) != node.seal_to.lower():
        raise ConfigError(
            f"node-config seal-to = {node.seal_to!r}: the run's sealing-key has the fingerprint "
            f"{fingerprint(public)}"
        )
    return public
