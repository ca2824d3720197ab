"""Requests that a client of a secure sum refuses, whatever the server says."""

import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from filelock import FileLock
from flwr.app import RecordDict

from client_app import secure_sum
from client_app.errors import PublicConfigError
from client_app.secure_sum import (
    Secrets,
    accept_roster,
    announce,
    forget_secrets,
    record_masked,
    reveal,
)
from osfl.cli.signing import make_signer
from osfl.config import NodeConfig, RunConfig, parse_run_config
from osfl.payload.masking import Roster, decrypt_share, encrypt_shares, pair_key
from osfl.payload.sum_messages import (
    PAIRS,
    SHARES,
    Reveal,
    pack_reveal,
    pack_roster,
    unpack_secrets,
)
from tests.helpers.settings import quick

MEMBERS = ("a", "b", "c", "d")
NODE = NodeConfig()


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return parse_run_config(quick(method="fedcgs", secure_sum=True, num_clients=4, min_clients=3))


class Sum:
    """Four members, each with a folder; each has delivered, unless another test says so."""

    def __init__(self, home: Path, nodes: dict[str, NodeConfig] | None = None):
        self.folders = {member: home / member for member in MEMBERS}
        self.nodes = nodes or dict.fromkeys(MEMBERS, NODE)
        replies = {
            member: announce(self.folders[member], self.nodes[member], "job", member)
            for member in MEMBERS
        }
        self.signatures = {
            member: reply.get("sum-signature", b"") for member, reply in replies.items()
        }
        keys = {member: reply["sum-key"] for member, reply in replies.items()}
        self.roster = Roster("job", 3, "layout", keys)

    def secrets(self, member: str) -> Secrets:
        secrets = secure_sum.load(self.folders[member])
        assert secrets is not None
        return secrets

    def deliver(self) -> None:
        for member in MEMBERS:
            record_masked(self.folders[member], self.secrets(member), self.roster, "sha")

    def accept(self, config: RunConfig, roster: Roster, member: str = "a") -> None:
        content = RecordDict({**pack_roster(roster, self.signatures)})
        accept_roster(content, config, self.nodes[member], member, "job", self.folders[member])

    def reveal(
        self, config: RunConfig, stage: str, delivered: str, member: str = "a"
    ) -> dict[str, bytes]:
        """Return what a member reveals after these clients have delivered."""
        place = MEMBERS.index(member)
        shares = {}
        for sender in delivered if stage == SHARES else "":
            secrets = self.secrets(sender)
            seed = bytes.fromhex(secrets.seed)
            shares[sender] = encrypt_shares(secrets.private_key, self.roster, sender, seed)[place]
        request = pack_reveal(Reveal(stage, tuple(delivered), shares))
        content = RecordDict({**pack_roster(self.roster, self.signatures), **request})
        node, folder = self.nodes[member], self.folders[member]
        reply = reveal(content, config, node, member, "job", folder)
        absent = tuple(client for client in MEMBERS if client not in delivered)
        return unpack_secrets(reply, tuple(delivered) if stage == SHARES else absent, stage)


@pytest.fixture
def members(tmp_path: Path) -> Sum:
    return Sum(tmp_path)


def test_a_client_keeps_its_secrets_to_its_owner(members: Sum, tmp_path: Path) -> None:
    before = members.secrets("a")
    again = announce(tmp_path / "a", NODE, "job", "a")
    # A server that asks twice gets the same key
    assert again == {"sum-key": bytes.fromhex(before.public)}
    assert members.secrets("a") == before
    file = tmp_path / "a" / "secure-sum.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert before.private != members.secrets("b").private


def test_other_members_than_at_first_are_refused(members: Sum, config: RunConfig) -> None:
    members.accept(config, members.roster)
    members.deliver()
    members.accept(config, members.roster)
    keys = {**members.roster.keys, "d": X25519PrivateKey.generate().public_key().public_bytes_raw()}
    with pytest.raises(PublicConfigError, match="has masked its payload of this job for other"):
        members.accept(config, Roster("job", 3, "layout", keys))


def test_a_roster_without_this_clients_key_is_refused(members: Sum, config: RunConfig) -> None:
    keys = {**members.roster.keys, "a": bytes(31) + b"\1"}
    for wrong in (keys, {client: keys[client] for client in "bcd"}):
        with pytest.raises(PublicConfigError, match="key is not among those of the secure sum"):
            members.accept(config, Roster("job", 3, "layout", wrong))


def test_a_lower_threshold_than_the_runs_is_refused(members: Sum, config: RunConfig) -> None:
    with pytest.raises(PublicConfigError, match="threshold of 4 is not the run's min-clients, 3"):
        members.accept(config, Roster("job", 4, "layout", members.roster.keys))
    with pytest.raises(PublicConfigError, match="a secure sum of 4 clients requires at least 3"):
        members.accept(config, Roster("job", 2, "layout", members.roster.keys))


def test_a_client_reveals_pairs_or_shares(members: Sum, config: RunConfig) -> None:
    members.deliver()
    roster = members.roster
    revealed = members.reveal(config, PAIRS, "abc")
    # The other end of the pair has the same key, and only that pair's is revealed
    assert revealed == {"d": pair_key(members.secrets("d").private_key, roster, "d", "a")}
    shares = members.reveal(config, SHARES, "abc")
    assert list(shares) == ["a", "b", "c"]
    # A repeated request gets the same answer
    assert members.reveal(config, PAIRS, "abc") == revealed


def test_never_both_of_one_member(members: Sum, config: RunConfig) -> None:
    members.deliver()
    members.reveal(config, SHARES, "abcd")
    with pytest.raises(PublicConfigError, match="said before that d was present"):
        members.reveal(config, PAIRS, "abc")
    members.reveal(config, PAIRS, "bcd", member="b")
    with pytest.raises(PublicConfigError, match="said before that a was absent"):
        members.reveal(config, SHARES, "abcd", member="b")
    # Neither by one member after the other
    with pytest.raises(PublicConfigError, match="said before that a was absent"):
        members.reveal(config, PAIRS, "abc", member="b")


def test_too_few_members_are_never_opened(members: Sum, config: RunConfig) -> None:
    members.deliver()
    for stage in (PAIRS, SHARES):
        with pytest.raises(PublicConfigError, match="fewer than 3 are not opened"):
            members.reveal(config, stage, "ab")
    with pytest.raises(PublicConfigError, match="and this one among them"):
        members.reveal(config, PAIRS, "bcd")


def test_a_client_that_has_not_delivered_reveals_nothing(members: Sum, config: RunConfig) -> None:
    for stage in (PAIRS, SHARES):
        with pytest.raises(PublicConfigError, match="has not delivered"):
            members.reveal(config, stage, "abc")


def test_a_share_of_another_sender_is_refused(members: Sum, config: RunConfig) -> None:
    members.deliver()
    secrets = members.secrets("b")
    shares = encrypt_shares(secrets.private_key, members.roster, "b", bytes.fromhex(secrets.seed))
    request = Reveal(SHARES, ("a", "b", "c"), dict.fromkeys("abc", shares[0]))
    content = RecordDict({**pack_roster(members.roster, {}), **pack_reveal(request)})
    with pytest.raises(PublicConfigError, match="the share from a cannot be opened"):
        reveal(content, config, NODE, "a", "job", members.folders["a"])
    # What was not sent is not remembered as revealed
    assert members.secrets("a").revealed == {}
    assert decrypt_share(members.secrets("a").private_key, members.roster, "a", "b", shares[0])


def test_messages_without_a_part_are_refused(members: Sum, config: RunConfig) -> None:
    members.deliver()
    folder = members.folders["a"]
    with pytest.raises(PublicConfigError, match="lacks the members of the secure sum"):
        accept_roster(RecordDict(), config, NODE, "a", "job", folder)
    content = RecordDict({**pack_roster(members.roster, {})})
    with pytest.raises(PublicConfigError, match="the request to reveal lacks a part"):
        reveal(content, config, NODE, "a", "job", folder)


def test_a_roster_of_another_job_or_with_odd_names_is_refused(
    members: Sum, config: RunConfig
) -> None:
    keys = dict(members.roster.keys)
    odd = {**{name: keys[name] for name in "abc"}, "d\ne": keys["d"]}
    for roster in (Roster("other", 3, "layout", keys), Roster("job", 3, "layout", odd)):
        with pytest.raises(PublicConfigError, match="of another job, or have invalid names"):
            members.accept(config, roster)


def test_a_client_at_work_joins_again(members: Sum, tmp_path: Path) -> None:
    """A server that was killed and resumes asks it to join while it trains."""
    with FileLock(tmp_path / "a" / "lock"):
        assert announce(tmp_path / "a", NODE, "job", "a")["sum-key"] == members.roster.keys["a"]


def test_secrets_end_with_the_sum(members: Sum, config: RunConfig) -> None:
    members.deliver()
    before = members.secrets("a")
    forget_secrets(members.folders["a"])
    after = members.secrets("a")
    assert (after.private, after.seed) == ("", "")
    assert after.masked == before.masked
    assert announce(members.folders["a"], NODE, "job", "a") == {
        "sum-key": bytes.fromhex(before.public)
    }
    with pytest.raises(PublicConfigError, match="the sum of this job is open"):
        members.reveal(config, PAIRS, "abc")


def test_corrupt_secrets_are_not_replaced(members: Sum, config: RunConfig) -> None:
    file = members.folders["a"] / "secure-sum.json"
    file.write_text(file.read_text().replace('"roster": ""', '"roster": "0"'))
    with pytest.raises(PublicConfigError, match="SHA-256 differs.*use another job-id"):
        members.accept(config, members.roster)


# ---- Known sites ----


@pytest.fixture
def sites(tmp_path: Path) -> dict[str, NodeConfig]:
    """Node settings of sites that know each other's keys."""
    files = {member: make_signer(tmp_path / "keys", member) for member in MEMBERS}
    peers = tmp_path / "peers"
    peers.write_text("".join(file.with_suffix(".pub").read_text() for file in files.values()))
    return {
        member: NodeConfig(secure_sum_key=str(file), secure_sum_peers=str(peers))
        for member, file in files.items()
    }


def test_sites_that_know_each_other_accept(
    sites: dict[str, NodeConfig], tmp_path: Path, config: RunConfig
) -> None:
    members = Sum(tmp_path, sites)
    for member in MEMBERS:
        members.accept(config, members.roster, member)


def test_a_substituted_key_is_refused(
    sites: dict[str, NodeConfig], tmp_path: Path, config: RunConfig
) -> None:
    """The server in the middle: it knows the private key that it gives out as b's."""
    members = Sum(tmp_path, sites)
    substitute = X25519PrivateKey.generate().public_key().public_bytes_raw()
    keys = {**members.roster.keys, "b": substitute}
    with pytest.raises(PublicConfigError, match="the key of b .* is not signed"):
        members.accept(config, Roster("job", 3, "layout", keys))
    members.signatures["b"] = b""
    with pytest.raises(PublicConfigError, match="the key of b .* is not signed"):
        members.accept(config, members.roster)


def test_an_invented_member_is_refused(
    sites: dict[str, NodeConfig], tmp_path: Path, config: RunConfig
) -> None:
    members = Sum(tmp_path, sites)
    extra = X25519PrivateKey.generate().public_key().public_bytes_raw()
    roster = Roster("job", 4, "layout", {**members.roster.keys, "e": extra})
    larger = parse_run_config(quick(method="fedcgs", secure_sum=True, num_clients=5, min_clients=4))
    with pytest.raises(PublicConfigError, match="e is not among the sites of node-config secure"):
        members.accept(larger, roster)


def test_wrong_files_of_keys_name_the_setting(tmp_path: Path, config: RunConfig) -> None:
    folder = tmp_path / "x"
    for content in (None, "no key"):
        file = tmp_path / "key"
        if content:
            file.write_text(content)
        with pytest.raises(PublicConfigError, match="node-config secure-sum-key: "):
            announce(folder, NodeConfig(secure_sum_key=str(file)), "job", "a")
    members = Sum(tmp_path, dict.fromkeys(MEMBERS, NodeConfig(secure_sum_peers="/none")))
    with pytest.raises(PublicConfigError, match="node-config secure-sum-peers: .*none"):
        members.accept(config, members.roster)


def test_a_site_may_demand_a_secure_sum(config: RunConfig) -> None:
    demanding = NodeConfig(secure_sum=True)
    secure_sum.check_demand(config, demanding, sends=True)
    open_run = parse_run_config(quick(method="fedcgs"))
    secure_sum.check_demand(open_run, NODE, sends=True)
    secure_sum.check_demand(open_run, demanding, sends=False)
    with pytest.raises(PublicConfigError, match="node-config secure-sum = true: .* set secure-sum"):
        secure_sum.check_demand(open_run, demanding, sends=True)
