"""`osfl sign` and `osfl supernode`: sign a run, and start a node that demands signatures."""

import getpass
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.cli.build import build_fab_from_disk

from osfl.config import IDENTIFIER_RULE, ConfigError, Scalar, is_identifier, parse_run_config
from osfl.launch import run_signatures
from osfl.launch.flower import copy_app
from osfl.launch.run_signatures import KEY, SignatureError, pack_document, unpack_document
from osfl.settings import default_config
from osfl.util.files import PUBLIC, make_private_folder, write_atomically
from osfl.util.text import sanitize

# Commands of Flower that would run a run's code without a check of its signatures
UNCHECKED_COMMANDS = ("flwr-agentapp",)


def make_signer(folder: Path, name: str) -> Path:
    """Create a signer's key pair, and return the private key's file.

    Raises:
        ConfigError: the name is invalid, or has a key already.
    """
    if not is_identifier(name):
        raise ConfigError(f"signer {name!r}: {IDENTIFIER_RULE}")
    file = folder / name
    if file.exists():
        raise ConfigError(f"{file} exists. To replace the key, move it away")
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    write_atomically(file.with_name(f"{name}.pub"), public + f" {name}\n".encode(), PUBLIC)
    write_atomically(file, private)
    return file


def load_signing_key(file: Path) -> Ed25519PrivateKey:
    """Return a signer's private key; ask for its password if it has one.

    Raises:
        ConfigError: the file is not an Ed25519 key, or the password is wrong.
    """
    try:
        data = file.read_bytes()
        key: object = _without_password(data)
        if key is None:
            password = getpass.getpass(f"password of {file}: ")
            key = serialization.load_ssh_private_key(data, password.encode())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--key {file}: {sanitize(error)}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"--key {file}: must be an Ed25519 key: osfl certs signer NAME")
    return key


def _without_password(data: bytes) -> object:
    """Return a private key, or None if it is encrypted."""
    try:
        return serialization.load_ssh_private_key(data, None)
    # cryptography raises it for an encrypted key without a password
    except TypeError:
        return None


def run_statement(overrides: dict[str, Scalar]) -> dict[str, Any]:
    """Return the statement that the signers of a run sign.

    Args:
        overrides: the run's settings other than the defaults, with its job id.

    Raises:
        ConfigError: the run has no job id.
    """
    from server_app.kit import client_kit_digests

    if not overrides.get("job-id"):
        raise ConfigError("job-id = '': a run that is signed must have one; set job-id=NAME")
    config = parse_run_config({**default_config(), **overrides})
    with tempfile.TemporaryDirectory(prefix="osfl-sign-") as scratch:
        app = copy_app(Path(scratch) / "app", config.method)
        bundle = build_fab_from_disk(app)
    return run_signatures.make_statement(bundle, overrides, client_kit_digests(config))


def sign_run(overrides: dict[str, Scalar], name: str, key: Ed25519PrivateKey, out: Path) -> int:
    """Sign a run, add the signature to a file, and return how many it has.

    Raises:
        ConfigError: the file has the signatures of another run, or the run has no job id.
    """
    if not is_identifier(name):
        raise ConfigError(f"signer {name!r}: {IDENTIFIER_RULE}")
    statement = run_statement(overrides)
    signatures: dict[str, str] = {}
    if out.exists():
        signed, signatures = read_signed(out)
        if signed != statement:
            raise ConfigError(
                f"{out} has the signatures of other settings, code or weights; choose another --out"
            )
    signatures[name] = run_signatures.sign(statement, key)
    write_atomically(out, pack_document(statement, signatures).encode(), PUBLIC)
    return len(signatures)


def read_signed(file: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the statement and the signatures in a file of `sign_run`.

    Raises:
        ConfigError: the file is damaged or missing.
    """
    try:
        return unpack_document(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, SignatureError) as error:
        raise ConfigError(f"{file}: {sanitize(error)}") from None


def signed_setting(file: Path, overrides: dict[str, Scalar]) -> dict[str, Scalar]:
    """Return a run's settings with the signatures in a file.

    Raises:
        ConfigError: the file has the signatures of another run.
    """
    statement, signatures = read_signed(file)
    if statement != run_statement(overrides):
        raise ConfigError(
            f"--signed {file}: was made for other settings, code or weights than these; have the "
            "run signed again"
        )
    return {**overrides, KEY: pack_document(statement, signatures)}


def node_environment(signers: Path, required: int, folder: Path) -> dict[str, str]:
    """Return the environment of a SuperNode that runs signed code only.

    Args:
        signers: file of the trusted signers.
        required: how many of them must sign.
        folder: for the commands that take the place of Flower's.

    Raises:
        ConfigError: the signers cannot be read, or are fewer than required.
    """
    try:
        trusted = run_signatures.read_signers(signers)
    except SignatureError as error:
        raise ConfigError(str(error)) from None
    if not 1 <= required <= len(trusted):
        raise ConfigError(
            f"--required {required}: must be 1 to {len(trusted)}, the trusted signers"
        )
    make_private_folder(folder)
    check = Path(run_signatures.__file__).resolve()
    # -P: no module in the working directory can shadow a library
    command = f'#!/bin/sh\nexec "{sys.executable}" -P "{check}" "$@"\n'
    write_atomically(folder / "flwr-clientapp", command.encode(), 0o700)
    refusal = "#!/bin/sh\necho 'this site runs signed ClientApps only' >&2\nexit 1\n"
    for name in UNCHECKED_COMMANDS:
        write_atomically(folder / name, refusal.encode(), 0o700)
    path = os.pathsep.join(
        [str(folder), str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    )
    return {
        **os.environ,
        "PATH": path,
        run_signatures.SIGNERS_VARIABLE: str(signers.resolve()),
        run_signatures.REQUIRED_VARIABLE: str(required),
    }


def start_supernode(signers: Path, required: int, arguments: Sequence[str]) -> None:
    """Replace this process by a SuperNode that runs signed code only.

    Args:
        signers, required: as in `node_environment`.
        arguments: of `flower-supernode`.

    Raises:
        ConfigError: as `node_environment`, or the arguments leave ClientApps to another process.
    """
    if any(word.partition("=")[2] == "process" or word == "process" for word in arguments):
        raise ConfigError(
            "--isolation process: another process would run the ClientApps; use subprocess"
        )
    folder = Path(os.environ.get("OSFL_STATE", "~/.osfl/state")).expanduser() / "commands"
    environment = node_environment(signers, required, folder)
    os.execvpe("flower-supernode", ["flower-supernode", *arguments], environment)
