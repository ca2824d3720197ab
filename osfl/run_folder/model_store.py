"""The global models of a run, with their tests and the scores of clients."""

import hashlib
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from osfl.metrics.histograms import ScoreHistograms, from_json
from osfl.run_folder.job_files import HINT_RECREATE, JobFiles
from osfl.util.files import CorruptFileError, read_json, write_atomically

if TYPE_CHECKING:
    # Takes seconds to import, and few readers need it
    import torch

    from osfl.payload.messages import LocalTest

# Suffix of the files on personalized models. No model's name has it: identifiers have no dot
ADAPTED = ".adapted"
MAX_CURVE_POINTS = 500
DIGEST_CHARACTERS = 64  # of a SHA-256


def main_model(names: Iterable[str]) -> str:
    """Return the name of the global model that a run shows first.

    FT or Mixed if there is one: a choice by accuracy on the clients' test images would be biased.
    """
    sorted_names = sorted(names)
    return next((name for name in ("FT", "Mixed") if name in sorted_names), sorted_names[0])


class ModelStore(JobFiles):
    """Owner of `models/`, `curves/`, `tests/`, and of the files of scores and contributions."""

    def store_model(
        self,
        name: str,
        state: "Mapping[str, torch.Tensor]",
        record: dict[str, Any],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Store a global model, then its record with the checksum and this process's peak memory.

        Args:
            metadata: the model's description (`osfl.inference.description`).
        """
        from osfl.util.costs import peak_memory_mb

        (self.path / "models" / f"{name}.json").unlink(missing_ok=True)
        digest = self.write_weights(f"models/{name}.safetensors", state, metadata)
        costs = {"peak_memory_mb": peak_memory_mb()}
        self.write_json(f"models/{name}.json", {**record, **costs, "sha256": digest})
        self._checkpoint_file(name).unlink(missing_ok=True)

    def store_checkpoint(self, name: str, inputs: str, state: Mapping[str, Any]) -> None:
        """Store the state of a model's training, until the model is stored.

        Args:
            inputs: a text that determines the training.
            state: tensors, numbers and texts.
        """
        import torch

        buffer = io.BytesIO()
        torch.save({"inputs": inputs, "state": dict(state)}, buffer)
        content = buffer.getvalue()
        digest = hashlib.sha256(content).hexdigest().encode()
        write_atomically(self._checkpoint_file(name), (digest, content))

    def stored_checkpoint(self, name: str, inputs: str) -> dict[str, Any] | None:
        """Read the state of a training of exactly these inputs; None if missing or corrupt."""
        import torch

        try:
            content = self._checkpoint_file(name).read_bytes()
        except FileNotFoundError:
            return None
        digest, saved = content[:DIGEST_CHARACTERS], content[DIGEST_CHARACTERS:]
        if hashlib.sha256(saved).hexdigest().encode() != digest:
            return None
        stream = io.BytesIO(saved)
        checkpoint = torch.load(stream, map_location="cpu", weights_only=True)
        state: dict[str, Any] = checkpoint["state"]
        return state if checkpoint["inputs"] == inputs else None

    def _checkpoint_file(self, name: str) -> Path:
        return self.path / "models" / f"{name}.checkpoint"

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

    @property
    def curves_folder(self) -> Path:
        """The path of the training curves: a file per model with its `steps` and `loss`."""
        return self.path / "curves"

    def store_curve(self, name: str, losses: Sequence[float]) -> None:
        """Store the losses of a training's steps, as the means of at most 500 equal windows."""
        size = math.ceil(len(losses) / MAX_CURVE_POINTS) or 1
        windows = [losses[first : first + size] for first in range(0, len(losses), size)]
        means = [sum(window) / len(window) for window in windows]
        last_steps = [min(number * size, len(losses)) for number in range(1, len(windows) + 1)]
        content = {"steps": last_steps, "loss": means}
        write_atomically(
            self.curves_folder / f"{name}.json", json.dumps(content).encode(), durable=False
        )

    def training_curves(self) -> dict[str, list[tuple[int, float]]]:
        """Read (step, mean loss since the previous one) by model; a corrupt curve is left out."""
        curves = {}
        for file in sorted(self.curves_folder.glob("*.json")):
            with suppress(CorruptFileError, KeyError, TypeError, ValueError):
                curve = read_json(file)
                steps = map(int, curve["steps"])
                curves[file.stem] = list(zip(steps, map(float, curve["loss"]), strict=True))
        return curves

    def model_files(self) -> list[Path]:
        """List the files of all models."""
        return sorted((self.path / "models").glob("*.safetensors"))

    def model_records(self) -> list[Path]:
        """List the records of all models, which are named after them."""
        return sorted((self.path / "models").glob("*.json"))

    def test_files(self) -> list[Path]:
        """List all models' confusion matrices, a global model before its personalized ones."""
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
        return self.path / "contribution" / "clients.json"

    def store_test(self, name: str, matrices: Mapping[str, list[list[int]]]) -> None:
        """Store a global model's confusion matrices by client: counts [true, predicted class]."""
        # Personalized models of an earlier test had that test's settings
        (self.path / "tests" / f"{name}{ADAPTED}.json").unlink(missing_ok=True)
        for stale in (name, f"{name}{ADAPTED}"):
            (self.path / "histograms" / f"{stale}.json").unlink(missing_ok=True)
        self.write_json(f"tests/{name}.json", dict(sorted(matrices.items())))

    def store_personalized_test(self, name: str, matrices: Mapping[str, list[list[int]]]) -> None:
        """Store the confusion matrix of each client's personalized model; like `store_test`."""
        self.write_json(f"tests/{name}{ADAPTED}.json", dict(sorted(matrices.items())))

    def store_histograms(
        self, name: str, histograms: Mapping[str, ScoreHistograms], personalized: bool = False
    ) -> None:
        """Store the histograms of a test by client, unless there are none; after the test."""
        if histograms:
            by_client = {client: histograms[client].as_json() for client in sorted(histograms)}
            # One line: indented, each count would have its own
            text = json.dumps(by_client, separators=(",", ":")) + "\n"
            file = self.path / "histograms" / f"{name}{ADAPTED if personalized else ''}.json"
            write_atomically(file, text.encode())

    def stored_histograms(self, stem: str) -> dict[str, ScoreHistograms]:
        """Read the histograms of a test by client; {} if there are none.

        Args:
            stem: of the test's file.

        Raises:
            CorruptFileError: the file is corrupt.
        """
        name = f"histograms/{stem}.json"
        by_client = self.read_json(name, {}, HINT_RECREATE) or {}
        try:
            return {client: from_json(counts) for client, counts in by_client.items()}
        except (KeyError, OverflowError, TypeError, ValueError):
            problem = f"{self.path / name} is corrupt; {HINT_RECREATE}"
            raise CorruptFileError(problem) from None

    def stored_test(self, name: str) -> dict[str, list[list[int]]]:
        """Read a global model's confusion matrices by client; {} before its test."""
        matrices: dict[str, list[list[int]]] = self.read_json(f"tests/{name}.json", {}) or {}
        return matrices

    @property
    def tests_apart_file(self) -> Path:
        """The path of the tests of test-only clients."""
        return self.path / "test-only.json"

    def store_tests_apart(self, tests: Mapping[str, Mapping[str, list[list[int]]]]) -> None:
        """Store the confusion matrices of test-only clients by model and client; {} removes them.

        They are apart, because figures of the run are over the clients that take part in it.
        """
        if tests:
            self.write_json(self.tests_apart_file.name, tests)
        else:
            self.tests_apart_file.unlink(missing_ok=True)

    @property
    def local_tests_file(self) -> Path:
        """The path of the tests of the clients' local-only models."""
        return self.path / "local-baseline.json"

    def store_local_tests(self, name: str, tests: "Mapping[str, LocalTest]") -> None:
        """Store the results of the clients' local-only models, compared to one global model."""
        clients = {client: asdict(test) for client, test in sorted(tests.items())}
        self.write_json(self.local_tests_file.name, {"model": name, "clients": clients})

    def remove_local_tests(self) -> None:
        """Remove the results of local-only models."""
        self.local_tests_file.unlink(missing_ok=True)

    def store_withheld(self, clients: Iterable[str]) -> None:
        """Store the names of the clients whose sites withhold their test results."""
        self.write_json("withheld.json", {"clients": sorted(clients)})

    def store_advice(self, figures: Mapping[str, Any], withheld: Iterable[str]) -> None:
        """Store the figures of `osfl advise`.

        Args:
            figures: by client.
            withheld: the clients whose sites withhold them.
        """
        self.write_json("advice.json", {"clients": dict(figures), "withheld": list(withheld)})

    def advice(self) -> dict[str, Any]:
        """Return the figures of `osfl advise` as `store_advice` wrote them.

        Raises:
            CorruptFileError: they are missing or corrupt.
        """
        advice = self.read_json("advice.json", {"clients": dict, "withheld": list})
        if advice is None:
            raise CorruptFileError(f"{self.path / 'advice.json'} is missing; repeat the command")
        return dict(advice)

    @property
    def advice_table(self) -> Path:
        """The path of the table of `osfl advise`."""
        return self.path / "advice.md"

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
        self.write_json("contribution/done.json", {"inputs": inputs, "hits": hits})

    def stored_hits(self, inputs: str) -> dict[str, list[bool]]:
        """Read the hits by the client that was left out; {} if they are of other images."""
        try:
            content = self.read_json("contribution/done.json", {"inputs": str, "hits": dict}) or {}
        # The models are trained again
        except CorruptFileError:
            return {}
        is_valid = all(isinstance(hits, list) for hits in content.get("hits", {}).values())
        return dict(content["hits"]) if is_valid and content.get("inputs") == inputs else {}

    def store_contributions(self, clients: Mapping[str, Any]) -> None:
        """Store each client's contribution to the global model."""
        self.write_json("contribution/clients.json", clients)
