"""Payloads that the server alone can read: HPKE by hand, keys, and a round of sealed payloads."""

import hashlib
import hmac
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from flwr.app import ConfigRecord, Context, Message, RecordDict
from typer.testing import CliRunner

from client_app import keys
from client_app.app import app, cache_key, client_settings
from client_app.keys import select_sealing_key
from osfl.cli.main import app as cli
from osfl.config import ConfigError, NodeConfig, parse_run_config
from osfl.payload import wire
from osfl.payload.encryption import (
    OVERHEAD,
    SealError,
    fingerprint,
    load_key,
    open_sealed,
    pack_public_key,
    public_bytes,
    seal,
    unpack_public_key,
)
from osfl.payload.messages import pack_bytes, unpack_bytes
from server_app.app import run_job
from server_app.federation.exchange import RoundError
from tests.helpers.loop_grid import LoopGrid
from tests.helpers.settings import quick
from tests.helpers.whole_runs import metrics, nodes

BLOB = b"what no one else may read " * 40


def extract(salt: bytes, key: bytes) -> bytes:
    return hmac.digest(salt or bytes(32), key, "sha256")


def expand(key: bytes, info: bytes, length: int) -> bytes:
    output = b""
    block = b""
    while len(output) < length:
        block = hmac.digest(key, block + info + bytes([len(output) // 32 + 1]), "sha256")
        output += block
    return output[:length]


def opened_by_hand(sealed: bytes, key: X25519PrivateKey, info: bytes) -> bytes:
    """RFC 9180 in base mode: X25519 with HKDF-SHA256 (0x0020), HKDF-SHA256 (1), AES-256-GCM (2)."""
    encapsulated_key, ciphertext = sealed[:32], sealed[32:]
    kem = b"KEM" + (0x20).to_bytes(2)

    def labeled_extract(suite: bytes, salt: bytes, label: bytes, ikm: bytes) -> bytes:
        return extract(salt, b"HPKE-v1" + suite + label + ikm)

    def labeled_expand(suite: bytes, prk: bytes, label: bytes, info: bytes, length: int) -> bytes:
        return expand(prk, length.to_bytes(2) + b"HPKE-v1" + suite + label + info, length)

    shared = key.exchange(X25519PublicKey.from_public_bytes(encapsulated_key))
    prk = labeled_extract(kem, b"", b"eae_prk", shared)
    secret = labeled_expand(kem, prk, b"shared_secret", encapsulated_key + public_bytes(key), 32)
    suite = b"HPKE" + (0x20).to_bytes(2) + (1).to_bytes(2) + (2).to_bytes(2)
    context = (
        b"\0"
        + labeled_extract(suite, b"", b"psk_id_hash", b"")
        + labeled_extract(suite, b"", b"info_hash", info)
    )
    prk = labeled_extract(suite, secret, b"secret", b"")
    aes = labeled_expand(suite, prk, b"key", context, 32)
    nonce = labeled_expand(suite, prk, b"base_nonce", context, 12)
    return AESGCM(aes).decrypt(nonce, ciphertext, b"")


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    result = CliRunner().invoke(cli, ["certs", "sealing", str(tmp_path / "keys")])
    assert result.exit_code == 0, result.output
    file = tmp_path / "keys" / "sealing.key"
    assert f"seal-to: {fingerprint(public_bytes(load_key(str(file))))}" in result.output
    return file


def test_a_sealed_payload_is_hpkes(key_file: Path) -> None:
    key = load_key(str(key_file))
    sealed = seal(BLOB, public_bytes(key), "job-1", "ward-7")
    assert len(sealed) == len(BLOB) + OVERHEAD
    assert BLOB[:26] not in sealed
    assert opened_by_hand(sealed, key, b"osfl payload 1\njob-1\nward-7") == BLOB
    assert open_sealed(sealed, key, "job-1", "ward-7") == BLOB
    assert seal(BLOB, public_bytes(key), "job-1", "ward-7") != sealed
    assert open_sealed(seal(b"", public_bytes(key), "j", "c"), key, "j", "c") == b""


def test_a_payload_for_another_key_job_or_client_stays_sealed(key_file: Path) -> None:
    key = load_key(str(key_file))
    sealed = seal(BLOB, public_bytes(key), "job-1", "ward-7")
    other_key = X25519PrivateKey.generate()
    flipped = bytearray(sealed)
    flipped[100] ^= 1
    for blob, with_key, job, client in (
        (sealed, other_key, "job-1", "ward-7"),
        (sealed, key, "job-2", "ward-7"),
        (sealed, key, "job-1", "ward-8"),
        (bytes(flipped), key, "job-1", "ward-7"),
        (sealed[:-1], key, "job-1", "ward-7"),
        (sealed[:20], key, "job-1", "ward-7"),
        (b"", key, "job-1", "ward-7"),
        (bytes(32) + sealed[32:], key, "job-1", "ward-7"),
        (BLOB, key, "job-1", "ward-7"),
    ):
        with pytest.raises(SealError, match="cannot be opened"):
            open_sealed(blob, with_key, job, client)


def test_a_key_is_its_owners_and_is_not_overwritten(key_file: Path) -> None:
    assert key_file.stat().st_mode & 0o777 == 0o600
    before = key_file.read_bytes()
    again = CliRunner().invoke(cli, ["certs", "sealing", str(key_file.parent)])
    assert again.exit_code == 1
    assert "exists" in again.output
    assert key_file.read_bytes() == before


def test_a_fingerprint_is_sha256_of_the_public_key(key_file: Path) -> None:
    public = public_bytes(load_key(str(key_file)))
    assert len(public) == 32
    assert fingerprint(public) == hashlib.sha256(public).hexdigest()


def test_a_file_that_is_no_such_key_is_named(tmp_path: Path) -> None:
    wrong = tmp_path / "other.key"
    wrong.write_bytes(
        ec.generate_private_key(ec.SECP384R1()).private_bytes(
            Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
        )
    )
    with pytest.raises(ConfigError, match=r"sealing-key = .*must be an X25519 key"):
        load_key(str(wrong))
    wrong.write_bytes(b"no key")
    for file in (wrong, tmp_path / "none.key"):
        with pytest.raises(ConfigError, match=r"sealing-key = .* must be a readable file"):
            load_key(str(file))


# ---- What a site asks for ----


def question(public: object) -> RecordDict:
    return RecordDict({"sealing": ConfigRecord({"public-key": public})})  # type: ignore[dict-item]


def test_a_site_seals_to_the_key_that_it_knows() -> None:
    public = bytes(range(32))
    site = NodeConfig(seal_to=fingerprint(public))
    assert select_sealing_key(RecordDict(pack_public_key(public)), site) == public
    assert select_sealing_key(RecordDict(pack_public_key(public)), NodeConfig()) == public
    assert select_sealing_key(RecordDict(pack_public_key(None)), NodeConfig()) is None
    capitals = NodeConfig(seal_to=fingerprint(public).upper())
    assert select_sealing_key(question(public), capitals) == public
    with pytest.raises(ConfigError, match=r"seal-to = .* sends no unencrypted payload, but the"):
        select_sealing_key(RecordDict(), site)
    with pytest.raises(ConfigError, match=r"seal-to = .* has the fingerprint [0-9a-f]{64}"):
        select_sealing_key(question(bytes(32)), site)


def test_a_run_with_a_key_gets_no_open_payload(home: Path, tiny_kit: Path) -> None:
    """Whoever carries the messages has taken the key's record out."""
    public = bytes(range(32))
    assert select_sealing_key(question(public), NodeConfig(), "/server.key") == public
    with pytest.raises(ConfigError, match="sealing-key = '/server.key': the message lacks the"):
        select_sealing_key(RecordDict(), NodeConfig(), "/server.key")
    config = quick(method="feddeo", kit=str(tiny_kit), sealing_key="/server.key")
    record = {"job": ConfigRecord({"job": "job"}), "kit": ConfigRecord({})}
    for kind in ("query.join", "train"):
        message = Message(RecordDict(record), dst_node_id=100, message_type=kind)
        message.metadata.__dict__["_message_id"] = "1"
        with pytest.raises(ConfigError, match="the message lacks the server's public key"):
            app(message, Context(1, 100, nodes(2)[0], RecordDict(), config))


@pytest.mark.parametrize("bad", [b"short", bytes(33), "text" * 8, 7])
def test_an_invalid_key_is_refused(bad: object) -> None:
    with pytest.raises(ValueError, match="sealing key must have 32 bytes"):
        unpack_public_key(question(bad))


@pytest.mark.parametrize("method", ["fedavg", "local"])
def test_models_that_go_to_and_fro_are_not_sealed(method: str) -> None:
    """Neither by the run, nor to a site that asks for it, whatever the run says."""
    with pytest.raises(ConfigError, match=r"sealing-key = '/k': method .* exchanges models"):
        parse_run_config(quick(method=method, sealing_key="/k"))
    site = NodeConfig(partition_id=0, num_partitions=2, seal_to="0" * 64)
    with pytest.raises(ConfigError, match="seal-to = '0+': this site sends no unencrypted payload"):
        client_settings(parse_run_config(quick(method=method)), site)
    client_settings(parse_run_config(quick(method="feddeo")), site)


def test_a_site_that_seals_its_payloads_joins_no_secure_sum() -> None:
    """Even if its key is in the request, which whoever carries the messages could add."""
    site = NodeConfig(partition_id=0, num_partitions=2, seal_to="0" * 64)
    run = parse_run_config(quick(method="fedcgs", secure_sum=True))
    with pytest.raises(ConfigError, match="seal-to = '0+': .* a secure sum's are masked"):
        client_settings(run, site)
    client_settings(run, replace(site, role="test"))


def test_settings_that_cannot_be_are_named() -> None:
    with pytest.raises(ConfigError, match="sealing-key = 'k': must be an absolute path"):
        parse_run_config(quick(method="feddeo", sealing_key="k"))
    with pytest.raises(ConfigError, match="max-payload-mb = 2148: a sealed payload has at most 21"):
        parse_run_config(quick(method="feddeo", sealing_key="/k", max_payload_mb=2148.0))
    parse_run_config(quick(method="feddeo", max_payload_mb=2148.0))
    for text in ("abc", "0" * 63, "0" * 65, "g" * 64, ":".join(["00"] * 32)):
        site = NodeConfig(partition_id=0, num_partitions=2, seal_to=text)
        with pytest.raises(ConfigError, match="seal-to = .* must be the 64 hex digits"):
            client_settings(parse_run_config(quick(method="feddeo")), site)


def test_to_whom_it_is_sealed_makes_no_payload_anew() -> None:
    """One with a guarantee would be another draw."""
    config = parse_run_config(quick(method="feddeo"))
    keys = {
        cache_key(config, NodeConfig(partition_id=0, num_partitions=2, seal_to=to), "")
        for to in ("", "0" * 64, "1" * 64)
    }
    assert len(keys) == 1


def test_a_node_that_cannot_seal_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="requires the package pyhpke"):
        select_sealing_key(question(bytes(32)), NodeConfig())
    assert select_sealing_key(RecordDict(), NodeConfig()) is None


# ---- A round ----


Tamper = Callable[[int, str, Message], Message]


def same(index: int, kind: str, reply: Message) -> Message:
    return reply


def run_sealed(
    kit: Path, key_file: Path | str, node: dict[str, Any], tamper: Tamper = same, **more: object
) -> LoopGrid:
    settings = {"method": "prompts-domain", "job_id": "job", "sealing_key": str(key_file)}
    config = quick(kit=str(kit), **{**settings, **more})
    grid = LoopGrid(app, config, [{**node_config, **node} for node_config in nodes(2)], tamper)
    run_job(grid, parse_run_config(config), "job")
    return grid


@pytest.mark.slow
def test_only_ciphertext_passes_through_the_superlink(
    home: Path, tiny_kit: Path, key_file: Path
) -> None:
    """The name of a client's domain is in its payload, and in no reply; the server has it open."""
    blobs: list[bytes] = []

    def watch(index: int, kind: str, reply: Message) -> Message:
        if kind == "train":
            blobs.append(unpack_bytes(reply.content.array_records["payload"]))
        return reply

    pin = {"seal-to": fingerprint(public_bytes(load_key(str(key_file))))}
    run_sealed(tiny_kit, key_file, pin, watch)
    assert len(blobs) == 2
    for client, sealed in zip(("client-0", "client-1"), blobs, strict=True):
        stored = (home / "runs" / "job" / "payloads" / f"{client}.pb").read_bytes()
        assert client.encode() in stored
        assert client.encode() not in sealed
        assert len(sealed) == len(stored) + OVERHEAD
        assert open_sealed(sealed, load_key(str(key_file)), "job", client) == stored
    assert metrics(home)["clients"].keys() == {"client-0", "client-1"}


@pytest.mark.slow
def test_a_payload_that_just_fits_still_does_when_it_is_sealed(
    home: Path, tiny_kit: Path, key_file: Path
) -> None:
    """The limit is for the payload, not for the key and the tag beside it."""
    settings = {"method": "feddeo", "kit": str(tiny_kit), "sealing_key": str(key_file)}
    first = quick(**settings, job_id="one")
    run_job(LoopGrid(app, first, nodes(2)), parse_run_config(first), "one")
    stored = (home / "runs" / "one" / "payloads").glob("*.pb")
    most = max(file.stat().st_size for file in stored)
    # The job's name is in it
    tight = quick(**settings, job_id="two", max_payload_mb=most / 1e6)
    run_job(LoopGrid(app, tight, nodes(2)), parse_run_config(tight), "two")
    assert metrics(home, "two")["clients"].keys() == {"client-0", "client-1"}
    small = quick(**settings, job_id="six", max_payload_mb=(most - 1) / 1e6)
    with pytest.raises(RoundError, match="payload"):
        run_job(LoopGrid(app, small, nodes(2)), parse_run_config(small), "six")


def test_an_open_payload_is_refused_where_sealed_ones_are_asked_for(
    home: Path, tiny_kit: Path, key_file: Path
) -> None:
    def unseal(index: int, kind: str, reply: Message) -> Message:
        if kind == "train" and index == 0:
            key = load_key(str(key_file))
            blob = open_sealed(
                unpack_bytes(reply.content.array_records["payload"]), key, "job", "client-0"
            )
            header = ConfigRecord({"version": wire.VERSION, "sha256": wire.digest(blob)})
            reply.content.array_records["payload"] = pack_bytes(blob, "osfl.payload.v1")
            reply.content.config_records["header"] = header
        return reply

    with pytest.raises(
        RoundError, match=r"client-0: .*cannot be opened: it is corrupt, or not sealed to"
    ):
        run_sealed(tiny_kit, key_file, {}, unseal)


def test_sealed_bytes_that_changed_on_the_way_are_refused(
    home: Path, tiny_kit: Path, key_file: Path
) -> None:
    def change(index: int, kind: str, reply: Message) -> Message:
        if kind == "train" and index == 1:
            sealed = bytearray(unpack_bytes(reply.content.array_records["payload"]))
            sealed[50] ^= 1
            reply.content.array_records["payload"] = pack_bytes(bytes(sealed), "osfl.payload.v1")
        return reply

    with pytest.raises(RoundError, match="client-1: .*cannot be opened: it is corrupt, or"):
        run_sealed(tiny_kit, key_file, {}, change)


def test_a_site_that_knows_another_key_does_not_join(
    home: Path, tiny_kit: Path, key_file: Path
) -> None:
    with pytest.raises(RoundError, match="seal-to = .*the run's sealing-key has the fingerprint"):
        run_sealed(tiny_kit, key_file, {"seal-to": "0" * 64})


@pytest.mark.slow
def test_a_pinned_site_takes_part_where_nothing_is_sent(home: Path, tiny_kit: Path) -> None:
    config = quick(method="prompts-only", kit=str(tiny_kit), job_id="job")
    grid = LoopGrid(app, config, [{**node_config, "seal-to": "0" * 64} for node_config in nodes(2)])
    run_job(grid, parse_run_config(config), "job")
    assert "train" not in {kind for _, kind in grid.sent}


@pytest.mark.slow
def test_a_payload_that_is_asked_for_again_is_sealed_to_the_new_key(
    home: Path, tiny_kit: Path, key_file: Path, tmp_path: Path
) -> None:
    """The server stops with the payloads under way; the job goes on with another key."""

    def stop(index: int, kind: str, reply: Message) -> Message:
        if kind == "train" and index == 1:
            raise KeyboardInterrupt
        return reply

    with pytest.raises(KeyboardInterrupt):
        run_sealed(tiny_kit, key_file, {}, stop)
    CliRunner().invoke(cli, ["certs", "sealing", str(tmp_path / "new")])
    new = tmp_path / "new" / "sealing.key"
    pin = {"seal-to": fingerprint(public_bytes(load_key(str(new))))}
    run_sealed(tiny_kit, new, pin)
    resent = {name: record["resent"] for name, record in metrics(home)["clients"].items()}
    assert resent["client-1"] == 1


def test_a_run_without_its_key_ends_before_anybody_works(home: Path, tiny_kit: Path) -> None:
    config = quick(method="prompts-domain", kit=str(tiny_kit), sealing_key="/nowhere/sealing.key")
    grid = LoopGrid(app, config, nodes(2))
    with pytest.raises(ConfigError, match="sealing-key = '/nowhere/sealing.key'"):
        run_job(grid, parse_run_config(config), "job")
    assert grid.sent == []


# ---- On the server's disk ----


def asked(grid: LoopGrid) -> list[int]:
    return [index for index, kind in grid.sent if kind == "train"]


SEALED: dict[str, Path] = {}  # a run and its key: they are made once in a process


@pytest.fixture
def payloads(
    home: Path, tiny_kit: Path, key_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Payloads of a run that keeps them sealed to the key file's key."""
    run = home / "runs" / "job"
    if SEALED:
        shutil.copy(SEALED["key"], key_file)
        shutil.copytree(SEALED["run"], run)
    else:
        assert asked(run_sealed(tiny_kit, key_file, {}, sealed_store=True)) == [0, 1]
        folder = tmp_path_factory.mktemp("sealed")
        SEALED["key"] = Path(shutil.copy(key_file, folder))
        SEALED["run"] = Path(shutil.copytree(run, folder / "job"))
    return run / "payloads"


@pytest.mark.slow
def test_payloads_stay_sealed_on_the_disk(payloads: Path, key_file: Path, tiny_kit: Path) -> None:
    """The client's name is in what the key opens, and not in what is stored."""
    for client in ("client-0", "client-1"):
        stored = (payloads / f"{client}.pb").read_bytes()
        payload = open_sealed(stored, load_key(str(key_file)), "job", client)
        assert client.encode() in payload
        assert client.encode() not in stored
        record = json.loads((payloads / f"{client}.json").read_text())
        assert record["sealed-to"] == fingerprint(public_bytes(load_key(str(key_file))))
        assert record["sha256"] == hashlib.sha256(stored).hexdigest()
        assert record["bytes"] == len(payload) + OVERHEAD
        # Nor is it, or its digest, anywhere else in the run's folder
        secrets = (payload, wire.digest(payload).encode())
        for file in payloads.parent.rglob("*"):
            assert file.is_dir() or not any(secret in file.read_bytes() for secret in secrets)
    assert not [file for file in payloads.parent.rglob("*") if file.suffix == ".refused"]
    result = CliRunner().invoke(cli, ["verify", str(payloads.parent)])
    assert result.exit_code == 0, result.output


@pytest.mark.slow
def test_a_job_goes_on_with_what_is_sealed(payloads: Path, key_file: Path, tiny_kit: Path) -> None:
    """And does not ask again; nor where the run no more wants them to stay so."""
    before = {file: file.read_bytes() for file in payloads.glob("*.pb")}
    for options in ({"sealed_store": True}, {}):
        assert asked(run_sealed(tiny_kit, key_file, {}, **options)) == []
        assert {file: file.read_bytes() for file in payloads.glob("*.pb")} == before


@pytest.mark.slow
def test_one_that_was_open_stays_open_and_is_named(
    home: Path, tiny_kit: Path, key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_sealed(tiny_kit, key_file, {})
    assert "remain unsealed" not in caplog.text
    assert asked(run_sealed(tiny_kit, key_file, {}, sealed_store=True)) == []
    assert (
        "sealed-store: payloads stored earlier remain unsealed: client-0, client-1" in caplog.text
    )


@pytest.mark.slow
@pytest.mark.parametrize("named", ["", "new"])
def test_without_their_key_nothing_is_lost(
    named: str, payloads: Path, tiny_kit: Path, key_file: Path, tmp_path: Path
) -> None:
    """The run ends before anybody is asked, and goes on with the right key."""
    CliRunner().invoke(cli, ["certs", "sealing", str(tmp_path / "new")])
    wrong = named and tmp_path / named / "sealing.key"
    before = {file: file.read_bytes() for file in payloads.iterdir()}
    right = fingerprint(public_bytes(load_key(str(key_file))))
    with pytest.raises(ConfigError, match=f"fingerprint {right}. Set sealing-key to that key"):
        run_sealed(tiny_kit, wrong, {})
    assert {file: file.read_bytes() for file in payloads.iterdir()} == before
    assert asked(run_sealed(tiny_kit, key_file, {})) == []
    # Without it, as the error says
    for file in list(payloads.iterdir()):
        file.rename(tmp_path / file.name)
    assert asked(run_sealed(tiny_kit, wrong, {})) == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 60, -1])
def test_a_corrupt_stored_payload_is_requested_again(
    place: int, payloads: Path, tiny_kit: Path, key_file: Path
) -> None:
    """And so is one client's that lies in another's place."""
    file = payloads / "client-1.pb"
    stored = bytearray(file.read_bytes())
    stored[place] ^= 1
    file.write_bytes(stored)
    assert asked(run_sealed(tiny_kit, key_file, {}, sealed_store=True)) == [1]
    file.write_bytes((payloads / "client-0.pb").read_bytes())
    assert asked(run_sealed(tiny_kit, key_file, {}, sealed_store=True)) == [1]


def test_nothing_stays_sealed_without_a_key() -> None:
    with pytest.raises(ConfigError, match="sealed-store = true: requires a sealing-key"):
        parse_run_config(quick(method="feddeo", sealed_store=True))
    settings = {"sealed_store": True, "sealing_key": "/k", "synthesis__workers": 2}
    with pytest.raises(ConfigError, match="synthesis.workers = 2 decrypted payloads"):
        parse_run_config(quick(method="feddeo", **settings))
