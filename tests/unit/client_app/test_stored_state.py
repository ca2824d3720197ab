"""State of a client at rest: payload cache, privacy ledger, decoded images, FedDyn's state."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict

from client_app import payload_cache
from client_app.app import app, cache_key
from client_app.context import ClientJob
from client_app.errors import ClientError
from client_app.image_cache import load_cached
from client_app.learning.local_training import _load_correction, _save_correction
from client_app.methods import domain, votes
from client_app.privacy.ledger import Draw, Ledger, ledger_folder
from osfl.config import ConfigError, NodeConfig, parse_run_config
from osfl.data.load import Images
from osfl.payload.kinds import Payload, Votes
from osfl.payload.messages import PRIVATE_COST_KEYS, pack_acknowledgement, unpack_bytes
from osfl.util.files import CorruptFileError, read_record, write_record
from tests.helpers.settings import quick
from tests.helpers.whole_runs import nodes


def flip(content: bytes) -> bytes:
    """One bit in the middle."""
    place = len(content) // 2
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def empty(content: bytes) -> bytes:
    return b""


DAMAGE = [flip, cut, empty]


class Site:
    """A client that is asked by hand.

    Attributes:
        made: the payloads that it made, not those that it sent again.
    """

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch):
        self.home = home
        self.made = 0
        self.fails = False
        for half in (domain, votes):
            monkeypatch.setattr(half, "make_payload", self._counted(half.make_payload))

    def _counted(self, make: Callable[[ClientJob], Payload]) -> Callable[[ClientJob], Payload]:
        def counted(job: ClientJob) -> Payload:
            self.made += 1
            if self.fails:
                raise MemoryError("killed")
            if job.config.method == "votes":
                return Votes(("zero",), torch.tensor([self.made], dtype=torch.uint8))
            return make(job)

        return counted

    def ask(self, kind: str, content: RecordDict, config: dict, **node: object) -> RecordDict:
        message = Message(content, dst_node_id=100, message_type=kind)
        message.metadata.__dict__["_message_id"] = "1"
        settings = {**nodes(2)[0], **node}
        return app(message, Context(1, 100, settings, RecordDict(), config)).content

    def train(self, config: dict, **node: object) -> RecordDict:
        record = RecordDict({"job": ConfigRecord({"job": "job"})})
        return self.ask("train", record, config, **node)

    def acknowledge(self, config: dict, sha256: str) -> None:
        self.ask("query.acknowledge", pack_acknowledgement("job", sha256), config)

    def ledger(self) -> list[Draw]:
        return Ledger(self.home / "state", "client-0").draws()

    def file(self, name: str) -> Path:
        (file,) = (self.home / "cache" / "job").rglob(name)
        return file


@pytest.fixture
def site(home: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(home, monkeypatch)


def sent(reply: RecordDict) -> bytes:
    return unpack_bytes(reply.array_records["payload"])


def digest_in(reply: RecordDict) -> str:
    return str(reply.config_records["header"]["sha256"])


# ---- The payload cache ----


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["payload.pb", "payload.json"])
def test_a_damaged_payload_is_made_anew(
    name: str, damage: Callable[[bytes], bytes], site: Site, tiny_kit: Path
) -> None:
    config = quick(method="prompts-domain", kit=str(tiny_kit))
    first = sent(site.train(config))
    file = site.file(name)
    file.write_bytes(damage(file.read_bytes()))
    again = site.train(config)
    assert sent(again) == first
    assert again.metric_records["costs"]["resent"] == 0.0
    assert site.made == 2
    assert site.train(config).metric_records["costs"]["resent"] == 1.0
    assert site.made == 2


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["payload.pb", "payload.json"])
def test_a_damaged_payload_with_a_guarantee_is_refused(
    name: str, damage: Callable[[bytes], bytes], site: Site, tiny_kit: Path
) -> None:
    """The same job again would be another noisy message about the same images."""
    config = quick(method="votes", kit=str(tiny_kit), epsilon=1.0)
    site.train(config)
    file = site.file(name)
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ConfigError, match=r"would spend epsilon = 1 again. .* remove the folder"):
        site.train(config)
    assert site.made == 1
    assert len(site.ledger()) == 1
    # As the site may decide
    for part in file.parent.iterdir():
        part.unlink()
    site.train(config)
    assert [draw.epsilon for draw in site.ledger()] == [1.0, 1.0]


def test_another_servers_run_takes_no_payload_away(site: Site, tiny_kit: Path) -> None:
    """Both chose the same job id. The server that asked first has not got its payload yet."""
    first = quick(method="votes", kit=str(tiny_kit))
    second = quick(method="votes", kit=str(tiny_kit), seed=7)
    waiting = sent(site.train(first))
    stored = digest_in(site.train(second))
    site.acknowledge(quick(method="fedavg", kit=str(tiny_kit)), "")
    site.acknowledge(second, "")
    site.acknowledge(second, "0" * 64)
    assert len(list((site.home / "cache" / "job").rglob("payload.pb"))) == 2
    site.acknowledge(second, stored)
    assert sent(site.train(first)) == waiting
    assert site.train(second).metric_records["costs"]["resent"] == 0.0


def test_only_the_payload_that_is_named_is_forgotten(tmp_path: Path) -> None:
    payload_cache.store(tmp_path, b"abc", {"epsilon": 0.0})
    (cached,) = [payload_cache.load(tmp_path)]
    assert cached is not None
    assert cached.blob == b"abc"
    of_abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert payload_cache.may_delete(tmp_path, of_abc)
    assert not payload_cache.may_delete(tmp_path, "")
    assert not payload_cache.may_delete(tmp_path, of_abc.replace("b", "c"))
    payload_cache.store(tmp_path, b"abc", {"epsilon": 0.5})
    assert not payload_cache.may_delete(tmp_path, of_abc)


def test_no_acknowledgement_forgets_what_a_guarantee_was_spent_on(
    site: Site, tiny_kit: Path
) -> None:
    private = quick(method="votes", kit=str(tiny_kit), epsilon=1.0)
    reply = site.train(private)
    for method in ("votes", "prompts-domain", "fedavg", "prompts-only"):
        site.acknowledge(quick(method=method, kit=str(tiny_kit)), digest_in(reply))
    assert sent(site.train(private)) == sent(reply)
    assert site.made == 1


# ---- The ledger ----


def test_sums_are_of_the_decimals_that_a_site_wrote(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, "a")
    for number in range(3):
        ledger.spend(f"job-{number}", "k", 0.1, 0.0, 0.3)
    with pytest.raises(ConfigError, match=r"epsilon-total = 0.3: with job 'job-3'"):
        ledger.spend("job-3", "k", 1e-9, 0.0, 0.3)


def test_a_draw_can_be_checked_before_it_is_booked(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, "a")
    ledger.spend("one", "k", 0.2, 0.0)
    # Not finished: the same draw is within it, another one is not
    ledger.check("one", "k", 0.2, 0.3)
    with pytest.raises(
        ConfigError, match="with job 'two' this client would have spent epsilon = 0.4"
    ):
        ledger.check("two", "k", 0.2, 0.3)
    ledger.mark_finished("one", "k")
    with pytest.raises(ConfigError, match="with job 'one' this client"):
        ledger.check("one", "k", 0.2, 0.3)
    assert [draw.job for draw in ledger.draws()] == ["one"]


def test_a_draw_that_was_not_finished_is_booked_once(site: Site, tiny_kit: Path) -> None:
    config = quick(method="votes", kit=str(tiny_kit), epsilon=1.0)
    site.fails = True
    for _ in range(3):
        with pytest.raises(ClientError, match="MEMORY"):
            site.train(config)
    assert [draw.kept for draw in site.ledger()] == [False]
    site.fails = False
    site.train(config)
    assert [draw.kept for draw in site.ledger()] == [True]


def test_a_payload_that_was_lost_costs_again(site: Site, tiny_kit: Path) -> None:
    config = quick(method="votes", kit=str(tiny_kit), epsilon=0.5)
    site.train(config)
    for name in ("payload.pb", "payload.json"):
        site.file(name).unlink()
    site.train(config)
    assert [draw.epsilon for draw in site.ledger()] == [0.5, 0.5]


@pytest.mark.parametrize(
    "key",
    ["epsilon-total", "cache-dir", "ledger-dir", "allowed-dirs", "device", "checkpointing", "kit"],
)
def test_settings_that_shape_no_payload_make_no_new_one(key: str, tiny_kit: Path) -> None:
    name = key.replace("-", "_")
    values = {"epsilon_total": 3.0, "checkpointing": "on", "device": "cpu"}
    config = parse_run_config(quick(method="votes", kit=str(tiny_kit), epsilon=1.0))
    node = NodeConfig(partition_id=0, num_partitions=2)
    peer = NodeConfig(partition_id=0, num_partitions=2, **{name: values.get(name, "/elsewhere")})  # type: ignore[arg-type]
    assert cache_key(config, node, "") == cache_key(config, peer, "")
    fewer = NodeConfig(partition_id=0, num_partitions=2, min_class_images=3)
    assert cache_key(config, node, "") != cache_key(config, fewer, "")


def test_a_raised_total_is_no_second_draw(site: Site, tiny_kit: Path) -> None:
    config = quick(method="votes", kit=str(tiny_kit), epsilon=1.0)
    named = {"client-id": "client-0"}
    first = site.train(config, **named, **{"epsilon-total": 1.0})
    again = site.train(config, **named, **{"epsilon-total": 9.0})
    assert sent(first) == sent(again)
    assert len(site.ledger()) == 1


@pytest.mark.parametrize("name", ["payload.pb", "payload.json"])
def test_a_lost_half_of_a_payload_with_a_guarantee_is_refused(
    name: str, site: Site, tiny_kit: Path
) -> None:
    config = quick(method="votes", kit=str(tiny_kit), epsilon=1.0)
    site.train(config)
    site.file(name).unlink()
    with pytest.raises(ConfigError, match="would spend epsilon = 1 again"):
        site.train(config)
    assert len(site.ledger()) == 1


def test_a_ledger_whose_volume_is_not_mounted_is_no_new_budget(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, "a")
    ledger.file.symlink_to(tmp_path / "volume" / "a.ledger.json")
    with pytest.raises(CorruptFileError, match="restore the site's ledger from a backup"):
        ledger.spend("one", "k", 0.5, 1e-6)
    assert ledger.file.is_symlink()


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_ledger_is_no_new_budget(
    damage: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    ledger = Ledger(tmp_path, "a")
    ledger.spend("one", "k", 0.5, 1e-6)
    ledger.file.write_bytes(damage(ledger.file.read_bytes()))
    with pytest.raises(
        CorruptFileError, match="corrupt .* restore the site's ledger from a backup"
    ):
        ledger.spend("two", "k", 0.5, 1e-6)


def test_a_figure_that_was_changed_in_the_ledger_is_noticed(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, "a")
    ledger.spend("one", "k", 0.5, 1e-6)
    ledger.file.write_text(ledger.file.read_text().replace("0.5", "0.1"))
    with pytest.raises(CorruptFileError, match="SHA-256 differs"):
        ledger.draws()


def test_a_ledger_of_an_older_version_is_taken_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    lines = [{"job": "old", "epsilon": 0.1}, {"job": "older", "epsilon": 0.1, "delta": 1e-6}]
    (cache / "a.epsilon").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    ledger = Ledger(tmp_path / "state", "a", older=cache)
    assert ledger.spend("new", "k", 0.1, 0.0, 0.3) == (0.3, 1e-6)
    assert f"moving the privacy ledger from {cache}" in caplog.text
    assert [draw.job for draw in Ledger(tmp_path / "state", "a").draws()] == ["old", "older", "new"]
    (cache / "b.epsilon").write_text('{"job": "old", "epsi')
    with pytest.raises(CorruptFileError, match=r"b.epsilon is corrupt"):
        Ledger(tmp_path / "state", "b", older=cache).draws()


def test_a_new_ledger_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Ledger(tmp_path, "a").spend("one", "k", 0.1, 0.0)
    assert f"starting a new privacy ledger in {tmp_path}" in caplog.text
    caplog.clear()
    Ledger(tmp_path, "a").spend("two", "k", 0.1, 0.0)
    assert not caplog.text


def test_the_ledger_is_outside_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert ledger_folder(NodeConfig(ledger_dir=str(tmp_path))) == tmp_path
    monkeypatch.setenv("OSFL_STATE", "/state")
    assert ledger_folder(NodeConfig(cache_dir="/cache")) == Path("/state")
    monkeypatch.delenv("OSFL_STATE")
    assert ledger_folder(NodeConfig()) == Path("~/.osfl/state").expanduser()
    with pytest.raises(ConfigError, match="ledger-dir = 'ledger': must be an absolute path"):
        ledger_folder(NodeConfig(ledger_dir="ledger"))


# ---- Costs ----


def test_costs_of_the_images_stay_where_a_guarantee_is_given(site: Site, tiny_kit: Path) -> None:
    private = site.train(quick(method="votes", kit=str(tiny_kit), epsilon=1.0))
    assert set(private.metric_records["costs"]) == set(PRIVATE_COST_KEYS)
    assert set(private.config_records["header"]) == {"version", "sha256"}
    # The site itself has them
    assert read_record(site.file("payload.json"))["costs"]["images"] == 30
    plain = site.train(quick(method="prompts-domain", kit=str(tiny_kit)))
    assert plain.metric_records["costs"]["images"] == 30


# ---- Other files ----


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["pixels.npy", "pixels.json"])
def test_damaged_images_are_decoded_anew(
    name: str, damage: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    calls = []

    def load() -> Images:
        calls.append(1)
        return Images(torch.arange(48, dtype=torch.uint8).view(1, 3, 4, 4), torch.tensor([1]))

    first = load_cached(tmp_path, "key", load)
    load_cached(tmp_path, "key", load)
    assert len(calls) == 1
    file = tmp_path / name
    file.write_bytes(damage(file.read_bytes()))
    again = load_cached(tmp_path, "key", load)
    assert len(calls) == 2
    assert torch.equal(first.pixels, again.pixels)
    assert torch.equal(first.labels, again.labels)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_state_of_feddyn_is_named(
    damage: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    state = {"w": torch.arange(1000, dtype=torch.float32)}
    _save_correction(tmp_path, 3, state)
    assert torch.equal(_load_correction(tmp_path, state)["w"], state["w"])
    (file,) = tmp_path.glob("feddyn-*")
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(
        CorruptFileError, match=r"feddyn-000003.* start the run again under another job"
    ):
        _load_correction(tmp_path, state)


def test_a_record_is_what_was_written(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    write_record(file, {"a": 0.1, "b": [1, 2]})
    assert read_record(file) == {"a": 0.1, "b": [1, 2]}
    file.write_text(file.read_text().replace("0.1", "0.2"))
    with pytest.raises(CorruptFileError, match="SHA-256 differs"):
        read_record(file)
    for text in ("{}", '{"sha256": 1, "content": []}', "5"):
        file.write_text(text)
        with pytest.raises(CorruptFileError, match="is corrupt"):
            read_record(file)
