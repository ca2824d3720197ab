"""The global models of a run, with their tests and the scores of clients."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from osfl.run_folder.job_files import JobFiles
from osfl.util.files import CorruptFileError, read_json

if TYPE_CHECKING:
    # Takes seconds to import, and few readers need it
    import torch

# Cannot occur in a model's name, because no identifier has a dot
ADAPTED = ".adapted"


class ModelStore(JobFiles):
    """Owner of `models/`, `tests/`, `withheld.json`, `agreement.json` and `influence/`."""

    def store_model(
        self, name: str, state: "Mapping[str, torch.Tensor]", record: dict[str, Any]
    ) -> None:
        """Store a global model, then its record with the checksum."""
        (self.path / "models" / f"{name}.json").unlink(missing_ok=True)
        digest = self.write_weights(f"models/{name}.safetensors", state)
        self.write_json(f"models/{name}.json", {**record, "sha256": digest})

    def stored_model(self, name: str, inputs: str) -> "dict[str, torch.Tensor] | None":
        """Read the model that was trained on exactly these inputs; None if missing or corrupt."""
        file = self.path / "models" / f"{name}.safetensors"
        try:
            record = read_json(file.with_suffix(".json"))
        # The model is trained again
        except CorruptFileError:
            return None
        if record.get("inputs") != inputs or not file.is_file():
            return None
        weights = file.read_bytes()
        is_intact = hashlib.sha256(weights).hexdigest() == record.get("sha256")
        if not is_intact or not isinstance(record.get("seconds"), int | float):
            return None
        from safetensors.torch import load

        return load(weights)

    def model_files(self) -> list[Path]:
        """List the files of all models."""
        return sorted((self.path / "models").glob("*.safetensors"))

    def model_records(self) -> list[Path]:
        """List the records of all models, which are named after them."""
        return sorted((self.path / "models").glob("*.json"))

    def test_files(self) -> list[Path]:
        """List the confusion matrices of all models, a global model before its adapted ones."""
        return sorted((self.path / "tests").glob("*.json"), key=lambda file: file.stem)

    @property
    def withheld_file(self) -> Path:
        """The path of the clients whose sites withhold their test results."""
        return self.path / "withheld.json"

    @property
    def scores_file(self) -> Path:
        """The path of the label-consistency scores."""
        return self.path / "agreement.json"

    @property
    def contributions_file(self) -> Path:
        """The path of the clients' contributions."""
        return self.path / "influence" / "clients.json"

    def store_test(self, name: str, matrices: Mapping[str, list[list[int]]]) -> None:
        """Store a global model's confusion matrices by client: counts [true, predicted class]."""
        # Adapted models of an earlier test had that test's settings
        (self.path / "tests" / f"{name}{ADAPTED}.json").unlink(missing_ok=True)
        self.write_json(f"tests/{name}.json", dict(sorted(matrices.items())))

    def store_adapted_test(self, name: str, matrices: Mapping[str, list[list[int]]]) -> None:
        """Store the confusion matrix of each client's adapted model; like `store_test`."""
        self.write_json(f"tests/{name}{ADAPTED}.json", dict(sorted(matrices.items())))

    def store_withheld(self, clients: Iterable[str]) -> None:
        """Store the names of the clients whose sites withhold their test results."""
        self.write_json("withheld.json", {"clients": sorted(clients)})

    def store_consistency_scores(self, inputs: str, clients: Mapping[str, Any]) -> None:
        """Store the label-consistency scores of every client's classes.

        Args:
            inputs: digest of the images that were scored.
        """
        self.write_json("agreement.json", {"inputs": inputs, "clients": clients})

    def stored_consistency_scores(self, inputs: str) -> dict[str, dict[str, float]]:
        """Read the scores by client and class name; {} if they are of other images."""
        try:
            content = self.read_json("agreement.json", {"inputs": str, "clients": dict}) or {}
        # The images are scored again
        except CorruptFileError:
            return {}
        if content.get("inputs") != inputs:
            return {}
        try:
            return {client: dict(row["classes"]) for client, row in content["clients"].items()}
        except (KeyError, TypeError, ValueError):
            return {}

    def store_hits(self, inputs: str, hits: Mapping[str, list[bool]]) -> None:
        """Store which images the models without a client classify correctly.

        The file lets a resumed run continue with the next client.
        """
        self.write_json("influence/done.json", {"inputs": inputs, "hits": hits})

    def stored_hits(self, inputs: str) -> dict[str, list[bool]]:
        """Read the hits by the client that was left out; {} if they are of other images."""
        try:
            content = self.read_json("influence/done.json", {"inputs": str, "hits": dict}) or {}
        # The models are trained again
        except CorruptFileError:
            return {}
        is_valid = all(isinstance(hits, list) for hits in content.get("hits", {}).values())
        return dict(content["hits"]) if is_valid and content.get("inputs") == inputs else {}

    def store_contributions(self, clients: Mapping[str, Any]) -> None:
        """Store each client's contribution to the global model."""
        self.write_json("influence/clients.json", clients)
