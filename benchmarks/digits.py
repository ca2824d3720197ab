"""docs/results-plain.md's table of thirty images a class.

`python -m benchmarks.digits`, with the options of `osfl compare`, such as `--seeds 0`.

Runs that are done are used again; an interrupted table goes on where it was.
"""

import os
import sys
from pathlib import Path

from osfl.cli.main import app

if __name__ == "__main__":
    os.chdir(Path(__file__).resolve().parent.parent)
    app(["compare", "configs/tables/one-shot.toml", "--out", "benchmarks/tables", *sys.argv[1:]])
