"""Signatures of a run by named persons, and their check at a site before any code of the run runs.

A statement names the SHA-256 of Flower's app bundle, every setting of the run, and the SHA-256 of
the kit's weights. Each signer signs it with an Ed25519 key.

At a site, this file is the command `flwr-clientapp` (`osfl supernode` arranges that). It checks the
bundle in Flower's process, after the bundle has arrived and before it is installed and imported.
The file imports nothing of this package, which would shadow the bundle's own copy.
"""

import base64
import hashlib
import json
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

# The run-config key that has the signatures
KEY = "signatures"
SIGNERS_VARIABLE = "OSFL_SIGNERS"
REQUIRED_VARIABLE = "OSFL_REQUIRED_SIGNATURES"
# Largest size of a document, and of a file of signers
MAX_BYTES = 1 << 20
# Distinguishes these signatures from others by the same keys
CONTEXT = b"osfl run 1\n"


class SignatureError(ValueError):
    """A run that the required signers did not sign as it is; the message names what differs."""


def make_statement(
    bundle: bytes, config: Mapping[str, Any], kit: Mapping[str, str]
) -> dict[str, Any]:
    """Return the statement that is signed.

    Args:
        bundle: Flower's app bundle, which has the default settings.
        config: the settings other than the defaults.
        kit: SHA-256 of the kit's weights, by file.
    """
    settings = {key: value for key, value in config.items() if key != KEY}
    return {"bundle": hashlib.sha256(bundle).hexdigest(), "config": settings, "kit": dict(kit)}


def sign(statement: Any, key: Ed25519PrivateKey) -> str:
    """Return a signature of a statement in base64."""
    return base64.b64encode(key.sign(_signed_bytes(statement))).decode()


def pack_document(statement: Any, signatures: Mapping[str, str]) -> str:
    """Return a statement and its signatures, by signer, as JSON."""
    document = {"statement": statement, "signatures": dict(signatures)}
    return json.dumps(document, sort_keys=True, separators=(",", ":"))


def unpack_document(text: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a statement and its signatures.

    Raises:
        SignatureError: the text is not a document of `pack_document`.
    """
    try:
        document = json.loads(text)
        statement = document["statement"]
        signatures = document["signatures"]
        parts = [statement["config"], statement["kit"], signatures]
        is_valid = all(isinstance(part, dict) for part in parts)
        is_valid &= all(isinstance(value, str) for value in signatures.values())
        is_valid &= isinstance(statement["bundle"], str)
    except (ValueError, KeyError, TypeError, RecursionError):
        is_valid = False
    if not is_valid or len(text) > MAX_BYTES:
        raise SignatureError("the run's signatures are damaged; sign it again with osfl sign")
    return statement, signatures


def read_signers(file: Path) -> dict[str, Ed25519PublicKey]:
    """Return the trusted signers of a file with a line `ssh-ed25519 KEY NAME` for each.

    Raises:
        SignatureError: the file cannot be read or has no signer, a line is not such a key, or two
            lines have the same name or key.
    """
    signers: dict[str, Ed25519PublicKey] = {}
    try:
        lines = file.read_bytes()[:MAX_BYTES].decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SignatureError(f"signers {file}: {error}") from None
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        place = f"signers {file}, line {number}"
        if len(words) != 3:
            raise SignatureError(f"{place}: must be `ssh-ed25519 KEY NAME`")
        try:
            key = serialization.load_ssh_public_key(" ".join(words[:2]).encode())
        except ValueError:
            key = None
        if not isinstance(key, Ed25519PublicKey):
            raise SignatureError(f"{place}: must be an Ed25519 key of OpenSSH")
        if words[2] in signers or key in signers.values():
            raise SignatureError(f"{place}: the name or the key is listed twice; remove one line")
        signers[words[2]] = key
    if not signers:
        raise SignatureError(f"signers {file}: must have at least one signer")
    return signers


def check_statement(statement: Mapping[str, Any], bundle: bytes, config: Mapping[str, Any]) -> None:
    """Compare a signed statement with the bundle and the settings that arrived.

    Raises:
        SignatureError: they differ; the message names the code or the key.
    """
    actual = make_statement(bundle, config, {})
    if statement["bundle"] != actual["bundle"]:
        raise SignatureError(
            f"the run's code ({actual['bundle'][:12]}) is not the signed code "
            f"({statement['bundle'][:12]!a})"
        )
    signed_config = statement["config"]
    for key in sorted({*signed_config, *actual["config"]}):
        value = json.dumps(actual["config"].get(key))
        signed_value = json.dumps(signed_config.get(key))
        if value != signed_value:
            raise SignatureError(
                f"{key[:80]!a} is {value[:200]}, but was signed as {signed_value[:200]}"
            )


def check_signatures(
    text: str,
    bundle: bytes,
    config: Mapping[str, Any],
    signers: Mapping[str, Ed25519PublicKey],
    required: int,
) -> list[str]:
    """Check that enough trusted signers signed this code with these settings; return their names.

    Args:
        text: the document of `pack_document`; "" for an unsigned run.
        bundle: Flower's app bundle, as it arrived.
        config: the run's settings other than the defaults, as they arrived.
        signers: the trusted signers' keys, by name.
        required: the number of them that must have signed.

    Raises:
        SignatureError: something differs, a signature is wrong, or too few signed.
    """
    demand = f"this site requires {required} of {', '.join(sorted(signers))}"
    if not text:
        raise SignatureError(f"the run is not signed; {demand}")
    statement, signatures = unpack_document(text)
    check_statement(statement, bundle, config)
    valid = [
        name
        for name, key in signers.items()
        if name in signatures and _is_signature(signatures[name], statement, key)
    ]
    if len(valid) < required:
        names = ", ".join(sorted(valid)) or "none of the trusted signers"
        raise SignatureError(f"the run is signed by {names}; {demand}")
    return sorted(valid)


def _is_signature(signature: str, statement: Any, key: Ed25519PublicKey) -> bool:
    try:
        key.verify(base64.b64decode(signature, validate=True), _signed_bytes(statement))
    except (ValueError, InvalidSignature):
        return False
    return True


def _signed_bytes(statement: Any) -> bytes:
    return CONTEXT + json.dumps(statement, sort_keys=True, separators=(",", ":")).encode()


def main() -> None:
    """Run as `flwr-clientapp`, and refuse a run that is not signed as this site requires."""
    from flwr.supernode.cli.flwr_clientapp import flwr_clientapp

    process: Any = import_module("flwr.supernode.runtime.run_clientapp")
    signers = read_signers(Path(os.environ[SIGNERS_VARIABLE]))
    required = int(os.environ[REQUIRED_VARIABLE])
    # A version of Flower without these functions fails here, instead of running unchecked
    pull = process.pull_task_input
    install = process.install_from_fab
    settings: dict[str, Any] = {}

    def keep_settings(*args: Any) -> Any:
        message, context, run, bundle = pull(*args)
        settings.update(run.override_config)
        return message, context, run, bundle

    def check_and_install(bundle: bytes, *args: Any, **kwargs: Any) -> Any:
        text = str(settings.get(KEY, ""))
        names = check_signatures(text, bundle, settings, signers, required)
        print(f"the run is signed by {', '.join(names)}", file=sys.stderr)
        return install(bundle, *args, **kwargs)

    process.pull_task_input = keep_settings
    process.install_from_fab = check_and_install
    flwr_clientapp()


if __name__ == "__main__":
    main()
