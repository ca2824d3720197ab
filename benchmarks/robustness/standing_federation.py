"""Run a standing federation of twelve sites that come in four waves, and of which two leave.

python -m benchmarks.robustness.standing_federation

`osfl serve` makes a version of the model after each wave, over a real SuperLink with TLS and node
keys. While the next version listens, a site may leave (`osfl forget`), and then every process is
killed and started again. The last version is compared with a fresh run of its ten sites. Its report
is runs/standing-federation/report.html.
"""

import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.harness import Experiment, Line
from osfl.data.digits import load_split
from osfl.util.files import make_private_folder
from osfl.util.prompts import DIGITS
from tests.helpers.settings import ROOT
from tests.helpers.standing import MINUTES, Standing, results
from tests.helpers.system_tools import Federation, apps_of, kill, new_federation

# Sites 0 and 1 have the halves of the first domain, 2 and 3 those of the second, and so on
WAVES = ((0, 2, 4), (6, 8, 10), (1, 3, 5), (7, 9, 11))
SITES = sum(map(len, WAVES))
# The sites that leave after a version
DEPARTURES = {2: 2, 3: 6}
PATIENCE = 30.0  # minutes for a wave
ARGUMENTS = (
    str(ROOT / "configs" / "demo.toml"),
    "method=prompts-domain",
    f"num-clients={len(WAVES[0])}",
    "data.name=folder",
    f"data.classes={','.join(DIGITS)}",
    "data.image-size=32",
    # As for the digits by default; other images are flipped
    "global-model.small-stem=true",
    "global-model.augmentation=affine-color",
    "join-timeout=1800.0",
    "deadline=1800.0",
    "test-timeout=1800.0",
)
EXPERIMENT = Experiment(
    __file__,
    caption="A standing federation (`osfl serve`) of twelve sites with half a domain of the digits "
    "each, which come in four waves: a version of the model after each, with configs/demo.toml and "
    "method = prompts-domain. "
    "Sites 2 and 6 leave after versions 2 and 3. After each version every process is killed "
    "(SuperLink, server, ServerApp, nodes, `osfl serve`) and started again. Accuracy: top-1 (%) at "
    "the version's clients, mean. Seconds: from the last join to the end of the test.",
)


def copy_kit(folder: Path) -> Path:
    """Copy the digits kit without its training record, with which folders of images refuse it."""
    digits_kit = ROOT / "kits" / "digits"
    ignored = shutil.ignore_patterns("training.json")
    return Path(shutil.copytree(digits_kit, folder / "kit", ignore=ignored))


def write_images(folder: Path) -> dict[int, str]:
    """Write each site's images, and return the part of its node-config that names them."""
    splits = {"train": load_split("private"), "test": load_split("test")}
    domains = sorted(set(splits["train"].domains))
    configs = {}
    for site in range(SITES):
        domain = domains[site // 2]
        for split, digits in splits.items():
            rows = np.flatnonzero(np.array(digits.domains) == domain)[site % 2 :: 2]
            for row in rows:
                file = folder / str(site) / split / DIGITS[digits.labels[row]] / f"{row}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(digits.images[row]).save(file)
        configs[site] = f"data-dir='{folder / str(site)}' domain='{domain}'"
    return configs


def play(federation: Federation) -> Iterator[Line]:
    """Yield a line for each version, and one for the fresh run of the last version's sites."""
    standing = Standing(
        federation,
        [*ARGUMENTS, f"kit={copy_kit(federation.folder)}"],
        versions=len(WAVES),
        data_of=write_images(federation.folder / "images").__getitem__,
        interval=3600,
    )
    federation.begin_superlink("process")
    federation.begin_server()
    for number in range(SITES):
        federation.register(f"site-{number}")
    present: set[int] = set()
    for version, wave in enumerate(WAVES, start=1):
        present |= set(wave)
        for site in wave:
            standing.begin_site(site)
        if version == 1:
            standing.serve(len(wave))
        standing.wait(lambda number=version: standing.version() == number, PATIENCE)
        yield line_of(standing, version)
        if version == len(WAVES):
            break
        awaited = {f"site-{site}" for site in present}
        standing.wait(
            lambda number=version + 1, names=awaited: standing.clients(number).keys() >= names,
            PATIENCE,
        )
        if site := DEPARTURES.get(version):
            federation.end(f"site-{site}")
            standing.osfl("forget", str(standing.run_folder(version)), "--client", f"site-{site}")
            present.remove(site)
        restart(standing, present)
        standing.serve(len(WAVES[version]))
    yield fresh_line(standing, present)


def restart(standing: Standing, sites: set[int]) -> None:
    """Kill every process, and start all but `osfl serve` again."""
    federation = standing.federation
    for app in apps_of(federation.processes["server"]):
        kill(app)
    for name in list(federation.processes):
        standing.kill(name)
    federation.begin_superlink("process")
    federation.begin_server()
    for site in sorted(sites):
        standing.return_site(site)


def line_of(standing: Standing, version: int) -> Line:
    """Return a version's line."""
    folder = standing.run_folder(version)
    metrics = json.loads((folder / "metrics.json").read_text())
    record = metrics.get("version") or {"new": list(metrics["clients"]), "carried": []}
    return {
        "": f"version {version}",
        "new clients": str(len(record["new"])),
        "earlier clients": str(len(record["carried"])),
        **figures_of(folder, metrics),
    }


def figures_of(folder: Path, metrics: Mapping[str, Any]) -> Line:
    """Return the work that a run did, and its accuracy."""
    status = json.loads((folder / "status.json").read_text())
    phases = {phase["phase"]: phase["began"] for phase in status["phases"]}
    manifest = (folder / "manifest.jsonl").read_text().splitlines()
    accuracy = metrics["accuracy"][metrics["shown"]]["average"]
    return {
        "images": str(len(manifest)),
        "seconds": f"{phases['finished'] - phases['waiting for payloads']:.0f}",
        "accuracy": f"{accuracy:.1f}",
    }


def fresh_line(standing: Standing, sites: set[int]) -> Line:
    """Run the sites' federation anew, and compare it with the last version."""
    federation = standing.federation
    settings = (f"num-clients={len(sites)}", "job-id=fresh")
    run = federation.begin_run(*standing.arguments, *settings)
    if run.wait(timeout=PATIENCE * MINUTES):
        raise SystemExit(federation.log("run")[-3000:])
    folder = standing.folder / "server" / "fresh"
    last = standing.run_folder(len(WAVES))
    is_equal = results(folder) == results(last)
    metrics = json.loads((folder / "metrics.json").read_text())
    return {
        "": "a fresh run of version 4's sites",
        "new clients": str(len(sites)),
        "earlier clients": "0",
        **figures_of(folder, metrics),
        "equal to version 4": "images, seeds and weights, bit by bit" if is_equal else "no",
    }


def main() -> None:
    """Play the federation and write the table."""
    make_private_folder(EXPERIMENT.work)
    began = time.monotonic()
    lines: list[Line] = []
    with tempfile.TemporaryDirectory() as scratch, new_federation(Path(scratch)) as federation:
        for line in play(federation):
            lines.append(line)
            print(f"{time.monotonic() - began:.0f} s: {line}", flush=True)
        report = Path(scratch) / "server" / f"study-v{len(WAVES)}" / "report.html"
        shutil.copy(report, EXPERIMENT.work / "report.html")
    EXPERIMENT.write_all(lines)


if __name__ == "__main__":
    main()
