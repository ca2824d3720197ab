"""Run folders with confusion matrices."""

import json
from pathlib import Path

from osfl.settings import default_config


def run_folder(folder: Path, tests: dict[str, dict], **config: object) -> Path:
    (folder / "tests").mkdir(parents=True)
    settings = {**default_config(), "method": "fedlmg", **config}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "status.json").write_text(json.dumps({"phase": "finished", "clients": {}}))
    for name, matrices in tests.items():
        (folder / "tests" / f"{name}.json").write_text(json.dumps(matrices))
    return folder
