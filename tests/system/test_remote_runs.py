"""Runs on a real federation: from Python, with another run's payloads, and with a site that only
tests.
"""

import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.system_tools import TWO_CLASSES, Federation, make_images, quick_arguments

pytestmark = pytest.mark.system
SUBMIT = (
    "import json, sys, osfl\n"
    "metrics = osfl.submit('test', *sys.argv[1:])\n"
    "print('metrics', json.dumps(metrics))\n"
)


def begin_sites(federation: Federation, folder: Path) -> None:
    """Start two sites that train, of which one keeps a page, and a regulator that tests."""
    make_images(folder / "images")
    further = {
        "site-a": f"comparison-dir='{folder / 'pages'}'",
        "site-b": "",
        "regulator": "role='test'",
    }
    for name, settings in further.items():
        federation.register(name)
        config = f"client-id='{name}' data-dir='{folder / 'images'}' domain='sketch'"
        config += f" cache-dir='{folder / f'cache-{name}'}' {settings}"
        federation.begin_node(name, *federation.trusting(name), config=config)


def check_results(metrics: dict) -> None:
    assert set(metrics["accuracy"]["FT"]) == {"site-a", "site-b", "average"}
    assert set(metrics["test_only"]) == {"regulator"}
    assert set(metrics["test_only"]["regulator"]["accuracy"]) == {"FT"}


@pytest.mark.timeout(900)
def test_a_job_from_python_and_one_with_its_payloads(
    federation: Federation, tmp_path: Path, tiny_kit: Path
) -> None:
    federation.begin_superlink()
    begin_sites(federation, tmp_path)
    settings = {"method": "prompts-domain", **TWO_CLASSES}
    arguments = quick_arguments(tiny_kit, job_id="base", **settings)
    process = subprocess.run(
        [sys.executable, "-c", SUBMIT, *arguments],
        cwd=tmp_path,
        env=federation.environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    *lines, result = process.stdout.splitlines()
    # Without a terminal the lines are those of the server's log
    assert any("testing on clients" in line for line in lines), lines
    results = json.loads(result.removeprefix("metrics "))
    check_results(results)
    base = tmp_path / "server" / "base"
    assert Path(results["report"]) == base / "report.html"
    check_results(json.loads((base / "metrics.json").read_text()))
    assert sorted(file.stem for file in (base / "payloads").glob("*.pb")) == ["site-a", "site-b"]
    (page,) = (tmp_path / "pages").iterdir()
    assert page.name == "base-site-a.html"
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    assert 'alt="seven, synthetic"' in page.read_text()

    changed = {**settings, "prompts_domain__guidance": 7.0, "payloads_from": "base"}
    run = federation.begin_run(*quick_arguments(tiny_kit, job_id="second", **changed))
    assert run.wait(timeout=400) == 0, federation.log("run")
    shown = federation.log("run")
    assert "upload none; " in shown
    assert " per client in job base; 4 synthetic images" in shown
    second = tmp_path / "server" / "second"
    metrics = json.loads((second / "metrics.json").read_text())
    check_results(metrics)
    assert metrics["payloads_from"] == "base"
    # The clients were asked to join and to test alone
    times = json.loads((second / "status.json").read_text())["times"]
    assert not [client for client in times if "asked" in times[client]]
    manifests = [(folder / "manifest.jsonl").read_bytes() for folder in (base, second)]
    assert manifests[0] != manifests[1]
