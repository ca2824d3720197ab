"""Messages of a secure sum, beside those in osfl/payload/messages.py. Imports no torch.

- `query.join`. Request: also the job's id. Reply: also the client's public key for this job, and
  its site's signature of it, if the site has a key for signatures.
- `train`. Request: also the roster with these keys and signatures. Reply: a masked payload.
- `query.reveal`. Request: roster, stage, the clients that delivered, and from each of these the
  share for this client. Reply: for each client that did not deliver, the key of the pair's mask
  (stage `pairs`); for each that did, the share of its own mask (stage `shares`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import ConfigRecord, RecordDict

from osfl.payload.masking import KEY_BYTES, SEED_BYTES, MaskingError, Roster

REVEAL = "query.reveal"
PAIRS = "pairs"
SHARES = "shares"
# Bytes of the secret that a stage reveals of each client
SECRET_BYTES = {PAIRS: KEY_BYTES, SHARES: SEED_BYTES}
_SUM = "secure-sum"


@dataclass(frozen=True)
class Reveal:
    """A request to reveal secrets that open the sum.

    Attributes:
        stage: `PAIRS` or `SHARES`.
        delivered: the clients whose payload is in the sum.
        shares: from each of them, its encrypted share for the receiver; empty in stage `PAIRS`.
    """

    stage: str
    delivered: tuple[str, ...]
    shares: Mapping[str, bytes]


def pack_job(job: str) -> dict[str, ConfigRecord]:
    """Pack the record that asks a joining client for its key of a job's secure sum."""
    return {_SUM: ConfigRecord({"job": job})}


def unpack_job(content: RecordDict) -> str:
    """Return the job of `pack_job`; "" if the run has no secure sum."""
    record = content.config_records.get(_SUM)
    return "" if record is None else str(record["job"])


def pack_roster(roster: Roster, signatures: Mapping[str, bytes]) -> dict[str, ConfigRecord]:
    """Pack a roster and each member's signature of its key, b"" for none."""
    record = ConfigRecord(
        {
            "job": roster.job,
            "threshold": roster.threshold,
            "settings": roster.settings,
            "clients": list(roster.members),
            "keys": [roster.keys[client] for client in roster.members],
            "signatures": [signatures.get(client, b"") for client in roster.members],
        }
    )
    return {_SUM: record}


def unpack_roster(content: RecordDict) -> tuple[Roster, dict[str, bytes]]:
    """Return the roster and the signatures.

    Raises:
        MaskingError: the record is not one of `pack_roster`, or the roster is invalid.
    """
    record: Any = content.config_records.get(_SUM, {})
    try:
        clients = [str(client) for client in record["clients"]]
        keys = [bytes(key) for key in record["keys"]]
        signatures = [bytes(signature) for signature in record["signatures"]]
        roster = Roster(
            str(record["job"]),
            int(record["threshold"]),
            str(record["settings"]),
            dict(zip(clients, keys, strict=True)),
        )
        by_client = dict(zip(clients, signatures, strict=True))
    except (KeyError, TypeError, ValueError):
        raise MaskingError("the message lacks the members of the secure sum") from None
    roster.check()
    return roster, by_client


def pack_reveal(request: Reveal) -> dict[str, ConfigRecord]:
    """Pack a request to reveal."""
    record = ConfigRecord(
        {
            "stage": request.stage,
            "delivered": list(request.delivered),
            "shares": [request.shares[client] for client in request.delivered]
            if request.shares
            else [],
        }
    )
    return {"reveal": record}


def unpack_reveal(content: RecordDict) -> Reveal:
    """Return a request to reveal.

    Raises:
        MaskingError: the record is not one of `pack_reveal`.
    """
    record: Any = content.config_records.get("reveal", {})
    try:
        stage = str(record["stage"])
        delivered = tuple(str(client) for client in record["delivered"])
        shares = [bytes(share) for share in record["shares"]]
        by_client = dict(zip(delivered, shares, strict=True)) if shares else {}
    except (KeyError, TypeError, ValueError):
        raise MaskingError("the request to reveal lacks a part") from None
    if stage not in SECRET_BYTES or (stage == SHARES and len(by_client) != len(delivered)):
        raise MaskingError(f"the request to reveal has stage {stage[:20]!r} and no shares")
    return Reveal(stage, delivered, by_client)


def pack_secrets(secrets: Mapping[str, bytes]) -> RecordDict:
    """Pack the reply to `query.reveal`."""
    record = ConfigRecord({"clients": list(secrets), "secrets": list(secrets.values())})
    return RecordDict({"reveal": record})


def unpack_secrets(content: RecordDict, clients: tuple[str, ...], stage: str) -> dict[str, bytes]:
    """Return what a client revealed of exactly these clients.

    Raises:
        ValueError: it is of other clients, or a secret has the wrong length.
    """
    record: Any = content.config_records["reveal"]
    names = [str(client) for client in record["clients"]]
    secrets = [bytes(secret) for secret in record["secrets"]]
    if sorted(names) != sorted(clients) or len(secrets) != len(names):
        raise ValueError(f"it reveals {len(names)} clients; {len(clients)} were asked for")
    if any(len(secret) != SECRET_BYTES[stage] for secret in secrets):
        raise ValueError(f"each secret must have {SECRET_BYTES[stage]} bytes")
    return dict(zip(names, secrets, strict=True))
