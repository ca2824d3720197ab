"""The rounds of iterative baselines."""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from osfl.run_folder.job_files import JobFiles

if TYPE_CHECKING:
    # Takes seconds to import, and few readers need it
    import torch

HINT_RESTART_ROUNDS = (
    "move the folder rounds away, and the same `osfl run` starts with the first round"
)
# Endings of a round's files
_MODEL = ".safetensors"
_MEMORY = ".memory.safetensors"
_ROUND = {"round": int, "seconds": int | float, "costs": dict, "sha256": dict}


class RoundStore(JobFiles):
    """Owner of `rounds/`."""

    def store_round(
        self,
        number: int,
        seconds: float,
        costs: Mapping[str, Any],
        model: "Mapping[str, torch.Tensor]",
        memory: "Mapping[str, torch.Tensor]",
    ) -> None:
        """Store a finished round: its weights, then the record with their checksums.

        Args:
            number: the round's number.
            seconds: time since the start of the first round.
            costs: each client's costs, summed over all rounds so far.
            model: the global model after the round.
            memory: the strategy's state between rounds.
        """
        digests = {
            "model": self.write_weights(f"rounds/{number:06d}{_MODEL}", model),
            "memory": self.write_weights(f"rounds/{number:06d}{_MEMORY}", memory),
        }
        previous = self.last_round() or {}
        times = [*previous.get("times", []), {"round": number, "seconds": seconds}]
        record = {"round": number, "seconds": seconds, "costs": costs, "sha256": digests}
        self.write_json("rounds/done.json", {**record, "times": times})
        for file in (self.path / "rounds").glob("*.safetensors"):
            if not file.name.startswith(f"{number:06d}"):
                file.unlink()

    @property
    def round_record_file(self) -> Path:
        """The path of the last round's record."""
        return self.path / "rounds" / "done.json"

    def rounds_identity(self) -> str:
        """Return random digits that identify the rounds of this run, also after it resumes.

        They are "" for rounds that an older version began, whose clients identify them by the job
        id alone.

        Raises:
            CorruptFileError: `identity.json` or the record of the last round is corrupt.
        """
        name = "rounds/identity.json"
        record = self.read_json(name, {"identity": str}, HINT_RESTART_ROUNDS)
        if record is None and self.last_round() is not None:
            return ""
        if record is None:
            record = {"identity": secrets.token_hex(16)}
            self.write_json(name, record)
        return str(record["identity"])

    def last_round(self) -> dict[str, Any] | None:
        """Read the record of the last round, or None before the first.

        It has the number (`round`), and `seconds`, `costs` and `times` of all rounds so far.

        Raises:
            CorruptFileError: it is corrupt.
        """
        file = "rounds/done.json"
        record: dict[str, Any] | None = self.read_json(file, _ROUND, HINT_RESTART_ROUNDS)
        return record

    def round_model(self, record: Mapping[str, Any]) -> "dict[str, torch.Tensor]":
        """Read the model after the last round.

        Args:
            record: the record of `last_round`.

        Raises:
            CorruptFileError: the model is missing or corrupt.
        """
        name = f"rounds/{record['round']:06d}{_MODEL}"
        return self.read_weights(name, record["sha256"].get("model"), HINT_RESTART_ROUNDS)

    def round_memory(self, record: Mapping[str, Any]) -> "dict[str, torch.Tensor]":
        """Read the strategy's state after the last round; like `round_model`."""
        name = f"rounds/{record['round']:06d}{_MEMORY}"
        return self.read_weights(name, record["sha256"].get("memory"), HINT_RESTART_ROUNDS)
