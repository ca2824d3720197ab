"""A run with another run's payloads (`payloads-from`): no client is asked, nothing else changes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from client_app.privacy.ledger import Ledger
from osfl.cli import certs, display
from osfl.cli.main import app as cli
from osfl.config import ConfigError, parse_run_config
from osfl.payload import wire
from osfl.run_folder.events import FollowedRun
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.report.page import human_bytes
from osfl.run_folder.verify import verify_run
from server_app.app import run_job
from server_app.federation.exchange import RoundError
from tests.helpers.loop_grid import LoopGrid
from tests.helpers.settings import quick
from tests.helpers.system_tools import quick_arguments
from tests.helpers.whole_runs import app, files, metrics, nodes, start, start_once

pytestmark = pytest.mark.slow
# What a run of the same settings gives again
RESULTS = ("accuracy", "confusion", "scores", "over_images", "clients")
OTHER = {"oscar__guidance": 3.0, "synthesis__steps": 3, "global_model__lr": 0.02}


def oscar(kit: Path, **settings: Any) -> dict[str, Any]:
    return quick(method="oscar", kit=str(kit), **settings)


def kinds(grid: LoopGrid) -> set[str]:
    """The kinds of the messages that clients got."""
    return {kind for _, kind in grid.sent}


def problems(folder: Path) -> list[str]:
    return [problem for finding in verify_run(folder) for problem in finding.problems]


@pytest.fixture
def base(home: Path, tiny_kit: Path) -> Path:
    """The folder of a finished run."""
    return start_once(home, oscar(tiny_kit), "base")


def test_the_result_is_that_of_a_run_that_asks_its_clients(
    home: Path,
    base: Path,
    tiny_kit: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same figures and images bit by bit, without a message for a payload; a whole folder."""
    asked = start(oscar(tiny_kit, **OTHER), "asked")
    caplog.set_level("INFO")
    caplog.clear()
    reused = start(oscar(tiny_kit, **OTHER, payloads_from="base"), "reused")
    assert "train" in kinds(asked)
    assert kinds(reused) == {"query.join", "evaluate"}
    results = metrics(home, "reused")
    for key in RESULTS[:-1]:
        assert results[key] == metrics(home, "asked")[key], key
    # Its clients' costs are those of the run that made the payloads
    assert results["clients"] == metrics(home, "base")["clients"]
    runs = [home / "runs" / job for job in ("asked", "reused")]
    manifests = [(run / "manifest.jsonl").read_bytes() for run in runs]
    assert manifests[0] == manifests[1] != (base / "manifest.jsonl").read_bytes()
    assert results["payloads_from"] == "base"
    assert metrics(home, "asked")["payloads_from"] == ""
    page = (runs[1] / "report.html").read_text()
    assert "The payloads are those of job <code>base</code>" in page
    sent = human_bytes(sum(row["upload_bytes"] for row in results["clients"].values()))
    assert f"<b>0 B</b><span>uploaded by all clients; {sent} in job base</span>" in page
    assert "<th>upload in job base</th>" in page
    assert "In this run no client sent a payload. In job <code>base</code> each had sent" in page
    assert "base</code> each had sent" not in (runs[0] / "report.html").read_text()
    assert results["summary"].startswith("No client sent a payload: two clients had each sent")
    # In the terminal, of a run here and of a log that is followed
    followed = FollowedRun()
    for line in caplog.messages:
        followed.read(f"INFO :      {line}")
    for shown in (results, followed.metrics):
        capsys.readouterr()
        display.print_metrics(shown)
        printed = capsys.readouterr().out
        each = human_bytes(results["clients"]["client-0"]["upload_bytes"])
        assert f"upload none; {each} per client in job base; 20 synthetic images" in printed
    shutil.rmtree(base)
    assert files(runs[1], "payloads").keys() == files(runs[0], "payloads").keys()
    assert problems(runs[1]) == []
    # Repeated, it needs the other run no more
    again = start(oscar(tiny_kit, **OTHER, payloads_from="base"), "reused")
    assert "train" not in kinds(again)


def test_payloads_of_a_run_that_reuses_them_are_reused(
    home: Path, base: Path, tiny_kit: Path
) -> None:
    start(oscar(tiny_kit, oscar__guidance=3.0, payloads_from="base"), "second")
    shutil.rmtree(base)
    start(
        oscar(tiny_kit, oscar__guidance=4.0, payloads_from=str(home / "runs" / "second")), "third"
    )
    source = RunFolder(home / "runs" / "third").payload_source()
    assert source is not None
    assert (Path(source.run).name, source.job) == ("second", "base")
    assert metrics(home, "third")["payloads_from"] == "base"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"epsilon": 1.0},
            "epsilon = 1.0: payloads of .*base were made with epsilon = 0.0; remove",
        ),
        (
            {"seed": 1},
            "seed = 1: payloads of .*base were made with seed = 0; remove the key, or ask",
        ),
        ({"method": "oscar-pooled"}, "method = 'oscar-pooled': payloads .* method = 'oscar'"),
        ({"payloads_from": "nothing"}, "payloads-from = 'nothing': .* is not the folder of a run"),
        ({"payloads_from": "runs/base"}, "payloads-from = 'runs/base': must be a job id in the"),
        (
            {"method": "fedavg"},
            "payloads-from = 'base': with the iterative method 'fedavg' clients",
        ),
        ({"method": "prompts-only"}, "with method 'prompts-only' clients send none"),
    ],
)
def test_what_cannot_be_reused_is_refused_by_name(
    settings: dict[str, Any], message: str, home: Path, base: Path, tiny_kit: Path
) -> None:
    config = {**oscar(tiny_kit, payloads_from="base"), **quick_changes(settings)}
    with pytest.raises(ConfigError, match=message):
        start(config, "other")


def test_a_dry_run_says_that_no_client_works(
    base: Path, home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path is relative to the working directory; what cannot be reused is refused here, too."""
    monkeypatch.chdir(home)
    settings = ["method=oscar", f"kit={tiny_kit}", "payloads-from=runs/base", "oscar.guidance=4"]
    shown = dry_run(tiny_kit, oscar__guidance=4.0)
    assert shown.exit_code == 0, shown.output
    assert "no client makes or sends a payload: the run uses 2 payloads of" in shown.output
    assert "base; clients only test" in shown.output
    assert "a client sends" not in shown.output
    refused = dry_run(tiny_kit, payload_codec="int8")
    assert refused.exit_code == 1
    assert "payload-codec = 'int8': payloads of" in refused.output
    remote = CliRunner().invoke(cli, ["run", "--dry-run", "--connection", "server", *settings])
    assert "must be a job id in the server's runs-dir, or an absolute path" in remote.output


def test_a_dry_run_of_a_resumed_run_needs_no_other_run(
    base: Path, home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    config = oscar(tiny_kit, oscar__guidance=4.0, payloads_from=str(base))
    start(config, "reused")
    shutil.rmtree(base)
    shown = dry_run(tiny_kit, oscar__guidance=4.0, job_id="reused")
    assert shown.exit_code == 0, shown.output
    assert "the run uses 2 payloads of" in shown.output
    refused = dry_run(tiny_kit, oscar__guidance=4.0, job_id="new")
    assert refused.exit_code == 1
    assert "is not the folder of a" in refused.output


def dry_run(kit: Path, **settings: Any) -> Result:
    arguments = quick_arguments(kit, method="oscar", **settings)
    return CliRunner().invoke(cli, ["run", "--dry-run", *arguments, "payloads-from=runs/base"])


def quick_changes(settings: dict[str, Any]) -> dict[str, Any]:
    return {key.replace("_", "-"): value for key, value in settings.items()}


def test_a_run_is_bound_to_its_payloads(home: Path, base: Path, tiny_kit: Path) -> None:
    """Resumed, it takes no others; a damaged one comes from the other run again, or is refused."""
    config = oscar(tiny_kit, oscar__guidance=3.0, payloads_from="base")
    start(config, "reused")
    start(oscar(tiny_kit), "twin")
    with pytest.raises(ConfigError, match="'reused' was started with payloads from .*base; use"):
        start({**config, "payloads-from": "twin"}, "reused")
    with pytest.raises(ConfigError, match="'twin' was started with its own payloads; use another"):
        start(oscar(tiny_kit, payloads_from="base"), "twin")
    payload = home / "runs" / "reused" / "payloads" / "client-1.pb"
    intact = payload.read_bytes()
    payload.unlink()
    payload.write_bytes(intact[:-1])
    assert problems(home / "runs" / "reused") == ["payloads/client-1.pb is corrupt"]
    # Without the key, too
    assert "train" not in kinds(start({**config, "payloads-from": ""}, "reused"))
    assert payload.read_bytes() == intact
    assert problems(home / "runs" / "reused") == []
    payload.unlink()
    (base / "payloads" / "client-1.pb").write_bytes(intact[:-1])
    with pytest.raises(
        ConfigError, match="the payload of client-1 in .*base is missing or corrupt"
    ):
        start(config, "reused")


def test_verify_notices_another_payload_with_a_record_of_its_own(
    home: Path, base: Path, tiny_kit: Path
) -> None:
    start(oscar(tiny_kit, oscar__guidance=3.0, payloads_from="base"), "reused")
    folder = home / "runs" / "reused"
    for ending in ("pb", "json"):
        (folder / "payloads" / f"client-0.{ending}").unlink()
        shutil.copy(
            base / "payloads" / f"client-1.{ending}", folder / f"payloads/client-0.{ending}"
        )
    (folder / "SHA256SUMS").unlink()
    assert "payloads/client-0.pb is not in payloads-from.json" in problems(folder)


def test_payloads_were_made_with_this_kit(home: Path, base: Path, tiny_kit: Path) -> None:
    kit = json.loads((base / "kit.json").read_text())
    name = next(iter(kit["payloads"]))
    kit["payloads"][name] = "0" * 64
    (base / "kit.json").write_text(json.dumps(kit))
    with pytest.raises(ConfigError, match="its payloads were made with another .* than the kit"):
        start(oscar(tiny_kit, oscar__guidance=3.0, payloads_from="base"), "reused")


def test_without_clients_there_are_models_and_a_report(
    home: Path, base: Path, tiny_kit: Path
) -> None:
    config = oscar(tiny_kit, oscar__guidance=3.0, payloads_from="base", join_timeout=1.0)
    start(config, "reused", count=0)
    folder = home / "runs" / "reused"
    assert metrics(home, "reused")["accuracy"] == {}
    assert any("no client is online" in text for text in metrics(home, "reused")["warnings"])
    assert (folder / "report.html").is_file()
    assert list((folder / "models").glob("*.safetensors"))
    assert problems(folder) == []
    # Clients that come later test it
    assert "evaluate" in kinds(start(config, "reused"))
    assert set(metrics(home, "reused")["not_tested"]) == set()


def test_a_test_only_client_alone_tests(home: Path, base: Path, tiny_kit: Path) -> None:
    config = oscar(tiny_kit, oscar__guidance=3.0, payloads_from="base", join_timeout=1.0)
    tester = {**nodes(3)[2], "role": "test"}
    grid = LoopGrid(app, config, [tester])
    run_job(grid, parse_run_config(config), "reused")
    results = metrics(home, "reused")
    assert results["accuracy"] == {}
    (row,) = results["test_only"].values()
    assert row["images"] > 0
    assert row["accuracy"]
    assert any("only test-only clients tested" in text for text in results["warnings"])
    assert not any("no client is online" in text for text in results["warnings"])
    assert problems(home / "runs" / "reused") == []


def test_too_few_payloads_are_refused(home: Path, base: Path, tiny_kit: Path) -> None:
    for ending in ("pb", "json"):
        (base / "payloads" / f"client-1.{ending}").unlink()
    config = oscar(tiny_kit, oscar__guidance=3.0, payloads_from="base")
    with pytest.raises(ConfigError, match="'base': .*base has 1 payloads; at least 2 are required"):
        start(config, "reused")
    start({**config, "min-clients": 1}, "reused")
    assert list(metrics(home, "reused")["clients"]) == ["client-0", "client-1"]


def test_no_client_is_asked_in_place_of_a_payload_that_cannot_be_read(
    home: Path, base: Path, tiny_kit: Path
) -> None:
    garbage = b"no payload"
    record = base / "payloads" / "client-1.json"
    metadata = {**json.loads(record.read_text()), "sha256": wire.digest(garbage)}
    record.write_text(json.dumps(metadata))
    record.with_suffix(".pb").write_bytes(garbage)
    config = oscar(tiny_kit, oscar__guidance=3.0, payloads_from="base")
    grid = LoopGrid(app, config, nodes(3))
    with pytest.raises(RoundError, match="'base': 1 of 2 payloads are valid; at least 2"):
        run_job(grid, parse_run_config(config), "reused")
    assert kinds(grid) == {"query.join"}


def test_sealed_payloads_need_their_key(home: Path, tiny_kit: Path) -> None:
    keys = [certs.make_sealing_key(home / name)[0] for name in ("keys", "others")]
    config = oscar(tiny_kit, sealed_store=True, sealing_key=str(keys[0]))
    start(config, "base")
    reusing = {**config, "payloads-from": "base", "oscar.guidance": 3.0}
    with pytest.raises(ConfigError, match="are sealed to the key with the fingerprint"):
        start({**reusing, "sealing-key": str(keys[1])}, "other")
    assert "train" not in kinds(start(reusing, "reused"))
    sealed = RunFolder(home / "runs" / "reused")
    assert sealed.sealing_fingerprint("client-0")
    assert problems(sealed.path) == []


def test_a_payload_with_a_guarantee_is_no_new_draw(home: Path, tiny_kit: Path) -> None:
    """A site whose budget is exhausted joins and tests, and books nothing."""
    sites = [
        {**node, "client-id": f"client-{number}", "epsilon-total": 1.0, "test-results": "exact"}
        for number, node in enumerate(nodes(2))
    ]
    config = quick(method="votes", kit=str(tiny_kit), epsilon=1.0)
    run_job(LoopGrid(app, config, sites), parse_run_config(config), "base")
    reusing = {**config, "votes.guidance": 3.0, "payloads-from": "base"}
    with pytest.raises(RoundError):
        run_job(LoopGrid(app, config, sites), parse_run_config(config), "again")
    run_job(LoopGrid(app, reusing, sites), parse_run_config(reusing), "reused")
    assert metrics(home, "reused")["not_tested"] == []
    for number in range(2):
        draws = Ledger(home / "state", f"client-{number}").draws()
        assert [(draw.job, draw.epsilon) for draw in draws] == [("base", 1.0)]
