"""The small files of a job: JSON results, and weights in safetensors' format."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from osfl.util.files import CorruptFileError, read_json, write_atomically

if TYPE_CHECKING:
    # Takes seconds to import, and few readers need it
    import torch

# Hints at the end of error messages
HINT_RECREATE = "repeat the same `osfl run` to recreate it"
HINT_RESTORE = "restore it from a backup, or use another job-id"


@dataclass(frozen=True)
class JobFiles:
    """Reading and writing of files in a run's folder.

    Attributes:
        path: the run's folder.
    """

    path: Path

    def write_json(self, name: str, value: Any) -> None:
        """Write a small result atomically."""
        write_atomically(self.path / name, (json.dumps(value, indent=1) + "\n").encode())

    def read_json(
        self, name: str, kinds: Mapping[str, Any] | None = None, hint: str = HINT_RESTORE
    ) -> Any:
        """Read a result of `write_json`, or None if there is none.

        Args:
            kinds: the types of the keys that the value, an object, must have; None: any value.
            hint: the end of the error message.

        Raises:
            CorruptFileError: the file is corrupt.
        """
        if not os.path.lexists(self.path / name):
            return None
        value = read_json(self.path / name, object if kinds is None else dict, hint)
        if not all(isinstance(value.get(key), kind) for key, kind in (kinds or {}).items()):
            raise CorruptFileError(f"{self.path / name} is corrupt; {hint}")
        return value

    def write_weights(
        self,
        name: str,
        state: "Mapping[str, torch.Tensor]",
        metadata: Mapping[str, str] | None = None,
    ) -> str:
        """Write tensors in safetensors' format; return the file's SHA-256.

        Args:
            metadata: at most one key, because safetensors writes several in random order.
        """
        from safetensors.torch import save

        contiguous = {key: tensor.contiguous() for key, tensor in state.items()}
        weights = save(contiguous, dict(metadata) if metadata else None)
        write_atomically(self.path / name, weights)
        return hashlib.sha256(weights).hexdigest()

    def read_weights(self, name: str, sha256: object, hint: str) -> "dict[str, torch.Tensor]":
        """Read the tensors of `write_weights`.

        Raises:
            CorruptFileError: the file is missing, or its SHA-256 differs.
        """
        file = self.path / name
        try:
            weights = file.read_bytes()
        except PermissionError:
            raise
        except OSError:
            weights = b""
        if hashlib.sha256(weights).hexdigest() == sha256:
            from safetensors.torch import load

            return load(weights)
        problem = "is corrupt" if file.exists() else "is missing"
        raise CorruptFileError(f"{file} {problem}; {hint}")
