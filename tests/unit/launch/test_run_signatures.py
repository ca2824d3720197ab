"""Signatures of a run, and all that a site must refuse."""

import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from osfl.launch.run_signatures import (
    KEY,
    SignatureError,
    check_signatures,
    make_statement,
    pack_document,
    read_signers,
    sign,
)

BUNDLE = b"the code of the run"
CONFIG: dict[str, Any] = {"method": "feddeo", "epsilon": 1.0, "seed": 3, "sealed-store": True}
KIT = {"unet": "ab" * 32}
KEYS = {name: Ed25519PrivateKey.generate() for name in ("alice", "bob", "carol")}
SIGNERS = {name: key.public_key() for name, key in KEYS.items()}
STATEMENT = make_statement(BUNDLE, CONFIG, KIT)


def signed(*names: str, statement: Any = STATEMENT) -> str:
    return pack_document(statement, {name: sign(statement, KEYS[name]) for name in names})


def test_signatures_of_enough_signers_are_accepted() -> None:
    assert check_signatures(signed("alice"), BUNDLE, CONFIG, SIGNERS, 1) == ["alice"]
    text = signed("bob", "alice")
    # The document is itself one of the settings that arrive
    assert check_signatures(text, BUNDLE, {**CONFIG, KEY: text}, SIGNERS, 2) == ["alice", "bob"]


def test_a_run_signed_by_one_of_two_is_refused() -> None:
    with pytest.raises(SignatureError, match=r"signed by bob; this site requires 2 of alice, bob"):
        check_signatures(signed("bob"), BUNDLE, CONFIG, SIGNERS, 2)
    with pytest.raises(SignatureError, match=r"not signed; this site requires 1 of alice"):
        check_signatures("", BUNDLE, CONFIG, SIGNERS, 1)
    strangers = {"alice": SIGNERS["alice"]}
    with pytest.raises(SignatureError, match="signed by none of the trusted signers"):
        check_signatures(signed("bob", "carol"), BUNDLE, CONFIG, strangers, 1)


def test_one_signature_under_two_names_counts_once() -> None:
    signature = sign(STATEMENT, KEYS["alice"])
    text = pack_document(STATEMENT, {"alice": signature, "bob": signature})
    with pytest.raises(SignatureError, match="signed by alice"):
        check_signatures(text, BUNDLE, CONFIG, SIGNERS, 2)


def test_one_changed_byte_of_the_code_is_refused() -> None:
    with pytest.raises(SignatureError, match=r"the run's code \(\w{12}\) is not the signed code"):
        check_signatures(signed("alice"), BUNDLE + b"x", CONFIG, SIGNERS, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epsilon": 100.0}, "'epsilon' is 100.0, but was signed as 1.0"),
        ({"seed": 3.0}, "'seed' is 3.0, but was signed as 3"),
        ({"data.root": "/other"}, """'data.root' is "/other", but was signed as null"""),
    ],
)
def test_a_changed_setting_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SignatureError, match=message):
        check_signatures(signed("alice"), BUNDLE, {**CONFIG, **changes}, SIGNERS, 1)


def test_a_missing_setting_is_named() -> None:
    fewer = {key: value for key, value in CONFIG.items() if key != "epsilon"}
    with pytest.raises(SignatureError, match="'epsilon' is null, but was signed as 1.0"):
        check_signatures(signed("alice"), BUNDLE, fewer, SIGNERS, 1)


@pytest.mark.parametrize("part", ["bundle", "config", "kit"])
def test_a_statement_that_was_changed_after_it_was_signed_is_refused(part: str) -> None:
    """The server changes settings, code or kit, and the statement beside them."""
    config = {**CONFIG, "epsilon": 9.0} if part == "config" else CONFIG
    bundle = b"other code" if part == "bundle" else BUNDLE
    kit = {"unet": "cd" * 32} if part == "kit" else KIT
    document = json.loads(signed("alice"))
    document["statement"] = make_statement(bundle, config, kit)
    with pytest.raises(SignatureError, match="signed by none of the trusted signers"):
        check_signatures(json.dumps(document), bundle, config, SIGNERS, 1)


def test_a_signature_of_something_else_by_the_same_key_is_refused() -> None:
    import base64

    plain = json.dumps(STATEMENT, sort_keys=True, separators=(",", ":")).encode()
    signature = base64.b64encode(KEYS["alice"].sign(plain)).decode()
    with pytest.raises(SignatureError, match="none of the trusted signers"):
        check_signatures(pack_document(STATEMENT, {"alice": signature}), BUNDLE, CONFIG, SIGNERS, 1)


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "{}",
        "[]",
        "[" * 100_000,
        '{"statement": 1, "signatures": {}}',
        '{"statement": {"bundle": 1, "config": {}, "kit": {}}, "signatures": {}}',
        '{"statement": {"bundle": "", "config": [], "kit": {}}, "signatures": {}}',
        '{"statement": {"bundle": "", "config": {}, "kit": {}}, "signatures": {"a": 1}}',
    ],
)
def test_a_damaged_document_is_refused(text: str) -> None:
    with pytest.raises(SignatureError, match="the run's signatures are damaged"):
        check_signatures(text, BUNDLE, CONFIG, SIGNERS, 1)


def line(name: str) -> str:
    public = SIGNERS[name].public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return f"{public.decode()} {name}\n"


def test_signers_are_read_from_lines_of_openssh(tmp_path: Path) -> None:
    file = tmp_path / "signers"
    file.write_text(f"# who may sign\n\n{line('alice')}{line('bob')}")
    assert read_signers(file) == {name: SIGNERS[name] for name in ("alice", "bob")}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must have at least one signer"),
        ("ssh-ed25519 AAAA alice\n", "line 1: must be an Ed25519 key of OpenSSH"),
        ("alice\n", "line 1: must be `ssh-ed25519 KEY NAME`"),
        (line("alice") * 2, "line 2: the name or the key is listed twice"),
        (line("alice") + line("alice").replace(" alice", " bob"), "line 2: the name or the key"),
    ],
)
def test_an_unfit_file_of_signers_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "signers"
    file.write_text(text)
    with pytest.raises(SignatureError, match=message):
        read_signers(file)
    with pytest.raises(SignatureError, match="No such file"):
        read_signers(tmp_path / "missing")
