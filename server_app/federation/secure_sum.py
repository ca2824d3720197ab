"""Server half of a secure sum: collect masked payloads, and open their sum.

osfl/payload/masking.py has the protocol. Members of which no payload arrived, or which did not
reveal the pairs' keys, are named as absent. What the server has named to a client it keeps in the
run's folder: a client never answers two versions of it.
"""

import time
from collections.abc import Mapping
from dataclasses import replace

from flwr.app import ConfigRecord, RecordDict
from flwr.serverapp import Grid

from osfl.config import RunConfig
from osfl.data.parts import class_names
from osfl.methods import METHODS
from osfl.payload.kinds import Masked, Payload, Sent
from osfl.payload.masking import (
    MaskingError,
    Numbers,
    combine_shares,
    from_bytes,
    missing_pairs,
    open_sum,
    to_bytes,
)
from osfl.payload.messages import ACKNOWLEDGE, pack_acknowledgement
from osfl.payload.sum_messages import (
    PAIRS,
    REVEAL,
    SHARES,
    Reveal,
    pack_reveal,
    unpack_secrets,
)
from osfl.payload.summands import SummandError, from_sums
from osfl.payload.wire import PayloadError
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.status import Status
from osfl.util.log import log
from osfl.util.text import sanitize
from server_app.expected import check_plausible
from server_app.federation import exchange as exchange_module
from server_app.federation.collect import collect
from server_app.federation.exchange import Exchange, RoundError, format_reasons, ignore
from server_app.federation.join import Members
from server_app.federation.secure_members import SecureMembers, select_members, store_members

# Secrets that clients revealed, by client and then by the client that they concern
Secrets = dict[str, dict[str, bytes]]


def collect_sum(
    grid: Grid,
    config: RunConfig,
    job_id: str,
    members: Members,
    folder: RunFolder,
    status: Status,
) -> dict[str, Sent]:
    """Return the payload of the sum over all clients, under the name of a client.

    Raises:
        RoundError: fewer than `min-clients` clients delivered, or revealed what opens the sum; or
            the sum cannot come from payloads.
    """
    secure = select_members(config, job_id, members, folder)
    content = folder.secure_sum()
    if content is None:
        expected = secure.expected(config, job_id)
        payloads = collect(grid, config, job_id, members, folder, status, expected, secure=secure)
        opening = Opening(grid, config, members, folder, status, secure, payloads)
        numbers = opening.open()
        secure = opening.secure
        folder.store_secure_sum(to_bytes(numbers))
    else:
        numbers = from_bytes(content)
    result = read_sum(numbers, config, secure)
    # Also when the sum was stored before: that server may have ended without acknowledging
    acknowledge(grid, config, members, folder, secure)
    return dict(result)


def sum_warnings(config: RunConfig, folder: RunFolder) -> list[str]:
    """Return a warning that names the members whose payloads are not in the sum, if any."""
    record = folder.secure_members() if config.secure_sum else None
    if not record or not record["absent"]:
        return []
    absent, members = record["absent"], len(record["clients"])
    return [
        f"the secure sum is of {members - len(absent)} of {members} clients, without "
        f"{', '.join(absent)}"
    ]


def read_sum(numbers: Numbers, config: RunConfig, secure: SecureMembers) -> dict[str, Payload]:
    """Return the payloads of a sum of integers.

    Raises:
        RoundError: the sum cannot come from payloads.
    """
    kind = METHODS[config.method].payload or ""
    # max-images bounds the images of one client, not of the sum
    unbounded = replace(config, max_images=10**9)
    try:
        sums = secure.layout.dequantize(numbers)
        members = len(secure.present)
        payloads = from_sums(kind, sums, class_names(config.data), members, secure.layout)
        for client, payload in payloads.items():
            check_plausible(payload, client, unbounded)
    except (SummandError, PayloadError) as error:
        raise RoundError(
            f"the secure sum cannot come from payloads: {sanitize(error)}. Some client sent other "
            "numbers, or the precision is too low: lower secure-sum-images and secure-sum-bound"
        ) from None
    return payloads


def acknowledge(
    grid: Grid, config: RunConfig, members: Members, folder: RunFolder, secure: SecureMembers
) -> None:
    """Let the members delete what they kept for the sum."""
    exchange = Exchange(grid, config.join_timeout)
    for client, node in secure.nodes(members).items():
        content = pack_acknowledgement(secure.roster.job, folder.payload_digest(client))
        exchange.push(node, ACKNOWLEDGE, content)
    end = time.monotonic() + exchange_module.ACKNOWLEDGE_SECONDS
    while exchange.unsent() and time.monotonic() < end:
        exchange.pull(ignore, ignore, ignore, end)
        exchange.wait(end)
    exchange.end()


class Opening:
    """The opening of a sum whose masked payloads have arrived.

    Attributes:
        secure: the members; those that do not reveal the pairs' keys become absent.
        reasons: the reason of each client that refused to reveal.
    """

    def __init__(
        self,
        grid: Grid,
        config: RunConfig,
        members: Members,
        folder: RunFolder,
        status: Status,
        secure: SecureMembers,
        payloads: Mapping[str, Sent],
    ):
        self._grid = grid
        self._config = config
        self._members = members
        self._folder = folder
        self._status = status
        self._payloads: dict[str, Masked] = {
            client: payload for client, payload in payloads.items() if isinstance(payload, Masked)
        }
        self.secure = secure
        self.reasons: dict[str, str] = {}

    def open(self) -> Numbers:
        """Return the sum of the present members' numbers.

        Raises:
            RoundError: fewer than `min-clients` revealed what opens it, or masks do not cancel.
        """
        self._status.phase("opening the sum", len(self._payloads))
        self._name_absent(set(self.secure.roster.members) - self._payloads.keys())
        pairs = self._pair_keys()
        roster = self.secure.roster
        present = self.secure.present
        revealed = self._ask(SHARES, roster.threshold)
        if len(revealed) < roster.threshold:
            raise RoundError(self._too_few(len(revealed)))
        try:
            seeds = {
                client: combine_shares(
                    roster, {sender: shares[client] for sender, shares in revealed.items()}
                )
                for client in present
            }
            masked = {
                client: from_bytes(self._payloads[client].numbers.numpy().tobytes())
                for client in present
            }
            return open_sum(masked, roster, seeds, pairs)
        except MaskingError as error:
            raise RoundError(f"{error}. Nothing of it is used") from None

    def _name_absent(self, clients: set[str]) -> None:
        """Name members as absent, for good.

        Raises:
            RoundError: fewer than the threshold stay.
        """
        absent = tuple(sorted({*self.secure.absent, *clients}))
        self.secure = replace(self.secure, absent=absent)
        if len(self.secure.present) < self.secure.roster.threshold:
            raise RoundError(self._too_few(len(self.secure.present)))
        store_members(self._folder, self.secure)
        for client in clients:
            self._status.client(client, "absent from the sum")

    def _pair_keys(self) -> dict[tuple[str, str], bytes]:
        """Return the key of each mask between a present and an absent member.

        A member that does not reveal them becomes absent itself, and the others reveal its keys.
        """
        while self.secure.absent:
            present = self.secure.present
            revealed = self._ask(PAIRS, len(present))
            silent = set(present) - revealed.keys()
            if not silent:
                pairs = missing_pairs(self.secure.roster, present)
                return {(client, other): revealed[client][other] for client, other in pairs}
            log.warning("the sum goes on without %s", ", ".join(sorted(silent)))
            self._name_absent(silent)
        return {}

    def _ask(self, stage: str, enough: int) -> Secrets:
        """Ask the present members to reveal their secrets of a stage, and return the replies.

        Args:
            enough: the number of replies with which the stage ends.
        """
        timeout = self._config.join_timeout
        exchange = Exchange(self._grid, timeout)
        client_of: dict[int, str] = {}
        present = self.secure.present
        concerned = present if stage == SHARES else self.secure.absent
        replies: Secrets = {}

        def read(_: int, content: RecordDict) -> dict[str, bytes]:
            return unpack_secrets(content, concerned, stage)

        def keep(node: int, secrets: dict[str, bytes]) -> None:
            replies[client_of[node]] = secrets
            self._status.advance(len(replies), enough)

        def fail(node: int, reason: str) -> None:
            self.reasons[client_of[node]] = reason
            log.warning("%s did not reveal: %s", client_of[node], reason)

        end = time.monotonic() + timeout
        while True:
            # Members that come back in the meantime are asked, too
            for client, node in self.secure.nodes(self._members).items():
                if node not in client_of:
                    client_of[node] = client
                    exchange.push(node, REVEAL, self._request(stage, client))
            owed_replies = exchange.pull(read, keep, fail, end)
            are_some_offline = len(client_of) < len(present)
            can_grow = bool(owed_replies) or are_some_offline
            if len(replies) >= enough or not can_grow or time.monotonic() >= end:
                break
            if are_some_offline:
                self._members.poll(end)
            exchange.wait(end)
        exchange.end()
        return replies

    def _request(self, stage: str, receiver: str) -> RecordDict:
        """Return the request to a member, with the shares that are encrypted to it."""
        present = self.secure.present
        shares: dict[str, bytes] = {}
        if stage == SHARES:
            place = self.secure.roster.members.index(receiver)
            shares = {
                sender: self._payloads[sender].shares[place].numpy().tobytes() for sender in present
            }
        return RecordDict(
            {
                "job": ConfigRecord({"job": self.secure.roster.job}),
                **self.secure.packed,
                **pack_reveal(Reveal(stage, present, shares)),
            }
        )

    def _too_few(self, count: int) -> str:
        return (
            f"{count} of {len(self.secure.roster.members)} members of the secure sum delivered and "
            f"revealed what opens it; at least {self.secure.roster.threshold} are required "
            f"(min-clients). Nothing is opened{format_reasons(self.reasons)}"
        )
