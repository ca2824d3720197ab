"""Client half of a secure sum: announce a key, accept a roster, and reveal what opens the sum.

osfl/payload/masking.py has the protocol. A client's secrets of a job lie beside its cached payload,
because Flower starts a process for each message. Three rules protect the payload, whatever the
server says:

1. Until its payload is acknowledged, a client masks for a single roster per job. The roster names
   all members, and the client's own key. With a DP guarantee the rule has no end.
2. A client reveals the pair's key or the share of each member, never both.
3. A client never reveals pairs' keys if fewer than `min-clients` members would remain.

Imports no torch, which a client does not need to join or to reveal.
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from filelock import FileLock
from flwr.app import RecordDict

from client_app.errors import PublicConfigError
from osfl.config import NodeConfig, RunConfig, is_identifier
from osfl.launch.run_signatures import SignatureError, read_signers
from osfl.payload.masking import (
    SEED_BYTES,
    MaskingError,
    Roster,
    check_identity,
    decrypt_share,
    pair_key,
    sign_identity,
)
from osfl.payload.sum_messages import (
    PAIRS,
    SHARES,
    Reveal,
    pack_secrets,
    unpack_reveal,
    unpack_roster,
)
from osfl.util.files import (
    OWNER_ONLY,
    CorruptFileError,
    ensure_own_folder,
    read_record,
    write_record,
)
from osfl.util.text import sanitize

_RECORD = "secure-sum.json"


@dataclass(frozen=True)
class Secrets:
    """A client's secrets of one job.

    Attributes:
        public: X25519 key, in hex.
        private: its private half; "" once the sum is open and nothing more is revealed.
        seed: b_u, from which the client's own mask is derived, in hex; "" once the sum is open.
        roster: the digest of the only roster that it masks for, in hex; "" before.
        masked: the SHA-256 of the masked payload; "" before.
        revealed: the secret that it revealed of each member: `pairs` or `shares`.
    """

    public: str
    private: str
    seed: str
    roster: str = ""
    masked: str = ""
    revealed: Mapping[str, str] = field(default_factory=dict)

    @property
    def private_key(self) -> X25519PrivateKey:
        """Return the private key, decoded.

        Raises:
            MaskingError: the sum is open.
        """
        if not self.private:
            raise MaskingError("the sum of this job is open; this client reveals nothing more")
        return X25519PrivateKey.from_private_bytes(bytes.fromhex(self.private))


def check_demand(config: RunConfig, node: NodeConfig, sends: bool) -> None:
    """Check that a site that demands a secure sum sends no other payload.

    Args:
        sends: whether the client sends a payload or models.

    Raises:
        PublicConfigError: the run has no secure sum.
    """
    if node.secure_sum and sends and not config.secure_sum:
        raise PublicConfigError(
            "node-config secure-sum = true: this site sends payloads only into a secure sum; set "
            "secure-sum = true in the run-config"
        )


def check_guarantee(config: RunConfig, node: NodeConfig, epsilon: float, delta: float) -> None:
    """Check that a site's guarantee is the sum's, to whose noise all clients contribute.

    Args:
        config: the run's.
        epsilon, delta: the stricter of the run's and this site's.

    Raises:
        PublicConfigError: the site asks for a stronger guarantee, or has not agreed to one that
            rests on the noise of other sites.
    """
    if not config.secure_sum:
        return
    # Without a guarantee, or for one without a delta, a delta means nothing
    own_delta = delta if config.guaranteed_delta else 0.0
    if (epsilon, own_delta) != (config.epsilon, config.guaranteed_delta):
        raise PublicConfigError(
            f"node-config epsilon = {node.epsilon:g}, delta = {node.delta:g}: a secure sum has one "
            f"guarantee for all sites; the run has {config.epsilon:g} and {config.delta:g}, and "
            "must have at most this site's"
        )
    if node.requires_guarantee and not node.secure_sum:
        raise PublicConfigError(
            "node-config secure-sum = false: in a secure sum a guarantee may rest on noise that "
            "other sites add; set secure-sum = true to agree, or use an open run"
        )


def announce(folder: Path, node: NodeConfig, job: str, client: str) -> dict[str, bytes]:
    """Return the client's public key of a job, and its site's signature, for the reply to a join.

    Raises:
        PublicConfigError: the site's private key cannot be read.
    """
    # Without the lock: a client that is at work holds it, and must still be able to join again
    secrets = load(folder) or _new_secrets(folder)
    public = bytes.fromhex(secrets.public)
    reply = {"sum-key": public}
    if node.secure_sum_key:
        identity = _identity(node.secure_sum_key)
        reply["sum-signature"] = sign_identity(identity, job, client, public)
    return reply


def _new_secrets(folder: Path) -> Secrets:
    """Create a client's secrets of a job, unless another process just did."""
    ensure_own_folder(folder.parent)
    ensure_own_folder(folder)
    with FileLock(folder / "lock", mode=OWNER_ONLY):
        secrets = load(folder)
        if secrets is None:
            key = X25519PrivateKey.generate()
            public = key.public_key().public_bytes_raw().hex()
            private = key.private_bytes_raw().hex()
            secrets = Secrets(public, private, os.urandom(SEED_BYTES).hex())
            _store(folder, secrets)
    return secrets


def accept_roster(
    content: RecordDict, config: RunConfig, node: NodeConfig, client: str, job: str, folder: Path
) -> tuple[Roster, Secrets]:
    """Return the roster of a request, and the secrets with which the client masks for it.

    Raises:
        PublicConfigError: the client does not accept the roster, by the rules above.
    """
    try:
        roster, signatures = unpack_roster(content)
        secrets = load(folder)
        if secrets is None or roster.keys.get(client, b"").hex() != secrets.public:
            raise MaskingError("this client's key is not among those of the secure sum")
        if roster.job != job or not all(map(is_identifier, roster.members)):
            raise MaskingError("the members are of another job, or have invalid names")
        if secrets.roster not in ("", roster.digest.hex()):
            raise MaskingError(
                "this client has masked its payload of this job for other members; use another "
                "job-id"
            )
        if roster.threshold != config.needed_clients:
            raise MaskingError(
                f"the server's threshold of {roster.threshold} is not the run's min-clients, "
                f"{config.needed_clients}"
            )
        _check_peers(roster, signatures, node, client)
    except MaskingError as error:
        raise PublicConfigError(f"secure-sum = true: {sanitize(error)}") from None
    return roster, secrets


def reveal(
    content: RecordDict, config: RunConfig, node: NodeConfig, client: str, job: str, folder: Path
) -> RecordDict:
    """Make the reply to `query.reveal`.

    Raises:
        PublicConfigError: the rules above forbid it.
    """
    with FileLock(folder / "lock", mode=OWNER_ONLY):
        roster, secrets = accept_roster(content, config, node, client, job, folder)
        try:
            request = unpack_reveal(content)
            _check_reveal(request, roster, secrets, client)
            result = _requested_secrets(request, roster, secrets, client)
        except MaskingError as error:
            raise PublicConfigError(f"secure-sum = true: {sanitize(error)}") from None
        # Stored before the reply is sent, so that no revealed secret can be forgotten
        revealed = {**secrets.revealed, **dict.fromkeys(result, request.stage)}
        _store(folder, replace(secrets, revealed=revealed))
    return pack_secrets(result)


def _check_reveal(request: Reveal, roster: Roster, secrets: Secrets, client: str) -> None:
    """Check rules 2 and 3.

    Raises:
        MaskingError: the request breaks one.
    """
    delivered = set(request.delivered)
    absent = set(roster.members) - delivered
    if not secrets.masked:
        raise MaskingError("this client has not delivered to the secure sum")
    if not delivered <= set(roster.members) or client not in delivered:
        raise MaskingError("the clients that delivered must be members, and this one among them")
    if len(delivered) < roster.threshold:
        raise MaskingError(
            f"{len(delivered)} clients delivered; fewer than {roster.threshold} are not opened"
        )
    for member in roster.members:
        other_kind = SHARES if member in absent else PAIRS
        if secrets.revealed.get(member) == other_kind:
            raise MaskingError(
                f"the server said before that {member} was "
                f"{'present' if member in absent else 'absent'}; a sum is opened once"
            )


def _requested_secrets(
    request: Reveal, roster: Roster, secrets: Secrets, client: str
) -> dict[str, bytes]:
    """Return the pair's key of each absent member, or the share of each that delivered."""
    private = secrets.private_key
    if request.stage == PAIRS:
        absent = [member for member in roster.members if member not in request.delivered]
        return {member: pair_key(private, roster, client, member) for member in absent}
    return {
        sender: decrypt_share(private, roster, client, sender, share)
        for sender, share in request.shares.items()
    }


def _check_peers(
    roster: Roster, signatures: Mapping[str, bytes], node: NodeConfig, client: str
) -> None:
    """Check that every other member's key is signed by a site that this one knows.

    Raises:
        MaskingError: a member is unknown, or its signature is not its site's.
        PublicConfigError: the file of known sites cannot be read.
    """
    if not node.secure_sum_peers:
        return
    try:
        identities = read_signers(Path(node.secure_sum_peers).expanduser())
    except SignatureError as error:
        raise PublicConfigError(f"node-config secure-sum-peers: {sanitize(error)}") from None
    for member in roster.members:
        if member == client:
            continue
        if member not in identities:
            raise MaskingError(f"{member} is not among the sites of node-config secure-sum-peers")
        check_identity(roster, member, signatures[member], identities[member])


def _identity(file: str) -> Ed25519PrivateKey:
    try:
        key: object = load_ssh_private_key(Path(file).expanduser().read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise PublicConfigError(f"node-config secure-sum-key: {sanitize(error)}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise PublicConfigError(
            "node-config secure-sum-key: must be an Ed25519 key; make one with `osfl certs signer`"
        )
    return key


def load(folder: Path) -> Secrets | None:
    """Return a job's secrets, or None if the client has none.

    Raises:
        PublicConfigError: they are corrupt.
    """
    file = folder / _RECORD
    if not file.exists():
        return None
    try:
        return Secrets(**read_record(file))
    except (CorruptFileError, TypeError) as error:
        raise PublicConfigError(
            f"secure-sum = true: {sanitize(error)}; use another job-id"
        ) from None


def record_masked(folder: Path, secrets: Secrets, roster: Roster, sha256: str) -> None:
    """Store the roster and the masked payload's SHA-256, before the payload is sent."""
    _store(folder, replace(secrets, roster=roster.digest.hex(), masked=sha256))


def forget_secrets(folder: Path) -> None:
    """Delete the private key and the seed of an open sum, but keep the record of it."""
    secrets = load(folder)
    if secrets is not None:
        _store(folder, replace(secrets, private="", seed=""))


def has_sent(folder: Path, sha256: str) -> bool:
    """Return whether the client has masked a payload with this SHA-256."""
    secrets = load(folder)
    return secrets is not None and bool(sha256) and secrets.masked == sha256


def _store(folder: Path, secrets: Secrets) -> None:
    write_record(folder / _RECORD, asdict(secrets))
