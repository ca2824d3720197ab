"""Refusals, withheld results and errors of a site that demands a guarantee."""

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from datasets import Image as ImageColumn
from flwr.app import ConfigRecord, Context, Message, RecordDict
from PIL import Image

from client_app.app import app, cache_key, client_settings
from client_app.errors import ClientError, PublicConfigError
from osfl.config import NodeConfig, parse_run_config
from osfl.data.named import load_rows
from osfl.data.pins import DEFAULTS
from osfl.methods import METHODS
from osfl.models import classifiers
from osfl.payload.error_codes import CODES, OTHER
from osfl.payload.messages import WITHHELD, SentModel, pack_model
from server_app.app import run_job
from server_app.federation.exchange import RoundError
from tests.helpers import analytic_classifier
from tests.helpers.analytic import random_pixels
from tests.helpers.loop_grid import LoopGrid
from tests.helpers.settings import ROOT, defaults, quick

CLASSES = ("mouse", "dog")
PATIENTS = ("Ada_Abel", "Ada_Berg", "Ada_Cruz")
# Who asks for a guarantee: the site for each payload, the site for all, or the run
ASKERS = ("epsilon", "epsilon-total", "run")
HANDLERS = ("query.join", "train", "query.acknowledge", "evaluate")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classifiers, "build_classifier", analytic_classifier.build)


def rows(seed: int = 0, each: int = 10) -> Dataset:
    """Images of two classes and three patients, no two alike."""
    pictures = [
        Image.fromarray(p.permute(1, 2, 0).numpy()) for p in random_pixels(2 * each, 16, seed=seed)
    ]
    columns = {
        "image": pictures,
        "label": [row % 2 for row in range(2 * each)],
        "finding": [CLASSES[row % 2] for row in range(2 * each)],
        "patient": [PATIENTS[row % 3] for row in range(2 * each)],
    }
    features = Features(
        image=ImageColumn(),
        label=ClassLabel(names=list(CLASSES)),
        finding=Value("string"),
        patient=Value("string"),
    )
    return Dataset.from_dict(columns, features=features)


@pytest.fixture
def part(tmp_path: Path) -> Path:
    """A site's part as `flwr-datasets create` saves it."""
    rows().save_to_disk(tmp_path / "part")
    return tmp_path / "part"


def site(part: Path, **settings: Any) -> dict[str, Any]:
    named = {key.replace("_", "-"): value for key, value in settings.items()}
    return {"client-id": "site-a", "data-dir": str(part), **named}


def run_config(**settings: Any) -> dict[str, Any]:
    base_settings = {
        "method": "fedpft",
        "data__name": "folder",
        "data__classes": ",".join(CLASSES),
        "classifier__init": "none",
        "classifier__architecture": "resnet18",
        "global_model__init": "none",
        "epsilon": 1.0,
        "num_clients": 1,
    }
    return quick(**{**base_settings, **settings})


def asks(
    kind: str,
    config: Mapping[str, Any],
    node: Mapping[str, Any],
    personalizes: bool = False,
    job: str = "job",
) -> Message:
    """A client's reply to one message, which it gets without having had any other before."""
    content = RecordDict({"job": ConfigRecord({"job": job}), "kit": ConfigRecord({})})
    if kind == "evaluate":
        model = analytic_classifier.build("resnet18", len(CLASSES))
        sent = SentModel(model.state_dict(), "resnet18", True, job, "FT", personalizes)
        content = pack_model(sent)
    message = Message(content, dst_node_id=7, message_type=kind)
    message.metadata.__dict__["_message_id"] = "1"
    return app(message, Context(1, 7, dict(node), RecordDict(), dict(config)))


def metrics_of(reply: Message) -> dict[str, Any]:
    return dict(reply.content.metric_records["metrics"])


# ---- A total (F1) ----


@pytest.mark.parametrize("kind", ["query.join", "train"])
@pytest.mark.parametrize("method", METHODS)
def test_a_site_with_a_total_sends_nothing_that_is_not_counted(
    part: Path, home: Path, method: str, kind: str
) -> None:
    """Whichever message comes first: a run without epsilon is refused, whatever its method."""
    config = run_config(method=method, epsilon=0.0, data__name="digits", data__classes="")
    node = {"client-id": "a", "partition-id": 0, "num-partitions": 2, "epsilon-total": 0.5}
    if METHODS[method].payload or METHODS[method].rounds:
        with pytest.raises(PublicConfigError, match="epsilon-total = 0.5: this site sends no"):
            asks(kind, config, node)
        return
    # It sends nothing but who it is
    site_config, _, _ = client_settings(
        parse_run_config(config), NodeConfig(client_id="a", epsilon_total=0.5)
    )
    assert site_config.epsilon == 0


def test_a_spent_total_is_reported_at_joining(
    part: Path, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A payload that was made before is no new one, and its job may be joined again."""
    node = site(part, epsilon_total=1.0)
    first = run_config(job_id="job")
    asks("query.join", first, node)
    asks("train", first, node)
    asks("query.join", first, node)
    with pytest.raises(PublicConfigError, match="epsilon-total = 1: with job 'other' .* spent"):
        asks("query.join", run_config(job_id="other", seed=5), node)
    asks("query.join", run_config(job_id="other", seed=5), {**node, "epsilon-total": 2.0})
    # A client that is left out sends no payload
    left_out = run_config(job_id="other", seed=5, num_clients=2, held_out="site-a")
    asks("query.join", left_out, node)


# ---- Errors (F2, F4) ----


def with_asker(asker: str, part: Path, **settings: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(run-config, node-config) of a site or a run that asks for a guarantee; "": neither does."""
    guarantee = {asker: 4.0} if asker in ("epsilon", "epsilon-total") else {}
    epsilon = 0.0 if asker in ("", "epsilon") else 1.0
    return run_config(epsilon=epsilon, **settings), {**site(part), **guarantee}


@pytest.mark.parametrize("kind", ["query.join", "train"])
@pytest.mark.parametrize("asker", ASKERS)
def test_with_a_guarantee_an_error_is_a_code(
    part: Path, home: Path, asker: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The values of a column of texts stay in the site's own log."""
    config, node = with_asker(asker, part, data__label_column="finding", data__classes="x,y")
    if asker != "run":
        node |= {"label-column": "finding", "classes": "x,y"}
    with pytest.raises(ClientError) as caught:
        asks(kind, config, node)
    assert str(caught.value) == "DATA (its own log has the details)"
    assert caught.value.__cause__ is caught.value.__context__ is None
    # Nor does the traceback, which a simulation sends, say where it failed
    assert caught.traceback[-1].name == "encode_private_errors"
    assert "no label of" in caplog.text


def test_without_a_guarantee_an_error_says_what_to_do(part: Path, home: Path) -> None:
    config, node = with_asker("", part, data__label_column="finding", data__classes="x,y")
    with pytest.raises(ValueError, match="data.label-column = 'finding': no label of"):
        asks("query.join", config, node)


@pytest.mark.parametrize("kind", HANDLERS)
@pytest.mark.parametrize("asker", ["epsilon", "run"])
def test_every_handler_sends_codes(
    home: Path, asker: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A part that cannot be read, of whose rows a client without an id asks its name."""
    part = home / "patient-17"
    rows().save_to_disk(part)
    (part / "state.json").write_text("patient-18")
    config, node = with_asker(asker, part, data__partition="domain")
    node |= {"client-id": "", "partition-id": 0, "test-results": "exact"}
    if (asker, kind) == ("epsilon", "query.acknowledge"):
        # Such a site is not named after its rows, and reads none to forget a payload
        asks(kind, config, node)
        return
    with pytest.raises(ClientError, match=r"^DATA \(its own log has the details\)$"):
        asks(kind, config, node)
    assert f"{kind} failed:" in caplog.text
    assert "patient-17" in caplog.text


@pytest.mark.parametrize("kind", ["train", "evaluate"])
@pytest.mark.parametrize("asker", ASKERS)
def test_an_image_that_cannot_be_read_is_not_named(
    home: Path, asker: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    broken = rows().cast_column("image", ImageColumn(decode=False)).to_list()
    for number, row in enumerate(broken):
        row["image"] = {"bytes": b"patient-%d" % number, "path": f"patient-{number}.png"}
    Dataset.from_list(broken, features=rows().features).save_to_disk(home / "ward")
    config, node = with_asker(asker, home / "ward")
    with pytest.raises(ClientError, match=r"^DATA \(its own log has the details\)$"):
        asks(kind, config, {**node, "test-results": "exact"})
    assert "not a readable image" in caplog.text


@pytest.mark.parametrize("asker", ASKERS)
def test_a_typo_in_a_key_is_reported_in_words(part: Path, home: Path, asker: str) -> None:
    """The error depends on settings alone."""
    config, node = with_asker(asker, part)
    with pytest.raises(PublicConfigError, match=r"sead: unknown key \(did you mean seed\?\)"):
        asks("query.join", {**config, "sead": 1}, node)
    with pytest.raises(PublicConfigError, match=r"epsilan: unknown key \(did you mean epsilon"):
        asks("query.join", config, {**node, "epsilan": 1.0})


def test_the_server_shows_the_client_and_its_code(part: Path, home: Path) -> None:
    config = run_config(data__classes="mouse,cat", join_timeout=2.0)
    node = site(part, epsilon=1.0, classes="mouse,cat")
    with pytest.raises(RoundError) as caught:
        run_job(LoopGrid(app, config, [node]), parse_run_config(config), "job")
    assert "node 100: DATA (its own log has the details)" in str(caught.value)
    assert "dog" not in str(caught.value)


# ---- Adaptation (F2) ----


@pytest.mark.slow
@pytest.mark.parametrize("asker", ASKERS)
@pytest.mark.parametrize("keeps", [True, False])
def test_adapting_with_a_guarantee_answers_the_same_whether_it_fails(
    part: Path, home: Path, asker: str, keeps: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    replies = []
    for rate in (0.01, 100.0):
        settings = {
            "personalization__lr": rate,
            "personalization__steps": 2000,
            "personalization__batch_size": 5,
        }
        config, node = with_asker(asker, part, **settings)
        node["test-results"] = "exact"
        if keeps:
            node["models-dir"] = str(home / f"kept-{rate}")
            Path(node["models-dir"]).mkdir()
        replies.append(metrics_of(asks("evaluate", config, node, personalizes=True)))
    assert replies == [{"seconds": 0.0, WITHHELD: 1}] * 2
    file_counts = [len(list(folder.iterdir())) for folder in sorted(home.glob("kept-*"))]
    assert file_counts == ([1, 0] if keeps else [])
    # Nobody would have a model that is not kept
    assert ("training diverged" in caplog.text) == keeps
    assert ("personalizing the global model" in caplog.text) == keeps


# ---- What is a test and what is a label (F3) ----


def test_values_that_a_site_need_not_name_are_the_defaults() -> None:
    for field, usual in DEFAULTS.items():
        assert defaults()[f"data.{field.replace('_', '-')}"] == usual
    assert set(DEFAULTS) <= {field.name for field in fields(NodeConfig)}


@pytest.mark.parametrize("kind", HANDLERS)
@pytest.mark.parametrize(
    ("key", "other"),
    [
        ("label-column", "patient"),
        ("image-column", "scan"),
        ("domain-column", "patient"),
        ("train-split", "test"),
        ("test-split", "held-out"),
        ("test-share", 0.5),
    ],
)
def test_columns_and_splits_are_the_sites(
    part: Path, home: Path, key: str, other: Any, kind: str
) -> None:
    """With a guarantee all others than the defaults must be named by the site; without one, a
    site that names one takes no other.
    """
    config = {**run_config(), f"data.{key}": other}
    with pytest.raises(PublicConfigError, match=f"data.{key} = .*; set {key} in its node-config"):
        asks(kind, config, site(part, epsilon=1.0))
    third = 0.4 if key == "test-share" else "third"
    for demand in ({}, {"epsilon": 1.0}):
        with pytest.raises(PublicConfigError, match=f"data.{key} = .*: must equal"):
            asks(kind, config, {**site(part, **demand), key: third})
    parsed = parse_run_config(config)
    client_settings(
        parsed, NodeConfig(data_dir=str(part), **{key.replace("-", "_"): other}, epsilon=1.0)
    )


def test_the_classes_are_the_sites_where_it_names_them(part: Path, home: Path) -> None:
    for classes in ("dog,mouse", "mouse", "mouse,dog,cat"):
        with pytest.raises(PublicConfigError, match="data.classes: must equal the list"):
            asks("query.join", run_config(), site(part, classes=classes))
    asks("query.join", run_config(), site(part, classes="mouse, dog"))


def test_no_run_asks_for_the_values_of_a_column_of_texts(
    part: Path, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Even of the column that the site names: its classes would tell which values there are."""
    config = run_config(data__label_column="patient", data__classes="Ada_Abel,Ada_Berg")
    node = site(part, epsilon=1.0, label_column="patient")
    for kind in ("query.join", "train"):
        with pytest.raises(ClientError, match="^DATA"):
            asks(kind, config, node)
    assert "the labels are strings" in caplog.text
    asks("query.join", config, {**node, "classes": "Ada_Abel,Ada_Berg"})


def test_allowed_settings_of_a_site_shape_no_payload(part: Path) -> None:
    """A site that changes it makes no second draw of a payload that it has."""
    parsed = parse_run_config(run_config())
    pinned = dict.fromkeys((*DEFAULTS, "classes", "test_results"), "x")
    here = cache_key(parsed, replace(NodeConfig(), **pinned), "")
    assert here == cache_key(parsed, NodeConfig(), "")


def test_the_codes_are_in_the_docs() -> None:
    page = (ROOT / "docs" / "privacy.md").read_text()
    (paragraph,) = re.findall(r"^\*\*Errors\.\*\* .*", page, re.MULTILINE)
    assert set(re.findall(r"`([A-Z]+)`", paragraph)) == {*CODES.values(), OTHER}


def test_a_cut_by_the_runs_seed_needs_a_test_split() -> None:
    """All clients read the data set whole."""
    config = quick(method="votes", data__name="hf:a/b", data__classes="a,b", data__partition="iid")
    config |= {"kit": "/none", "epsilon": 1.0}
    parsed = parse_run_config(config)
    here = {"partition_id": 0, "num_partitions": 2, "epsilon": 1.0, "client_id": "a"}
    with pytest.raises(PublicConfigError, match="data.partition = 'iid': .* set test-split"):
        client_settings(parsed, NodeConfig(**here))
    client_settings(parsed, NodeConfig(**here, data_dir="/part"))
    client_settings(parse_run_config({**config, "data.partition": "domain"}), NodeConfig(**here))
    named = parse_run_config({**config, "data.test-split": "test"})
    client_settings(named, NodeConfig(**here, test_split="test"))


@pytest.mark.parametrize("kind", ["query.join", "evaluate"])
@pytest.mark.parametrize("shape", ["splits", "folders", "one split"])
def test_a_training_image_is_no_test_image(
    home: Path, shape: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Under two names, of which one test would tell exactly; where no test leaves, all is well."""
    place = home / "site"
    if shape == "splits":
        DatasetDict(train=rows(), test=rows().select([3])).save_to_disk(place)
    elif shape == "one split":
        # The fourth of each class is a test image where there are ten
        Dataset.from_list(
            [*rows().to_list(), *rows().to_list()], features=rows().features
        ).save_to_disk(place)
    else:
        for split in ("train", "test"):
            for row in rows(each=2):
                name = f"{split}-{row['patient']}-{row['label']}.png"
                file = place / split / CLASSES[row["label"]] / name
                file.parent.mkdir(parents=True, exist_ok=True)
                row["image"].save(file)
    node = site(place, epsilon=1.0, test_results="exact")
    with pytest.raises(ClientError, match="^DATA"):
        asks(kind, run_config(), node)
    assert "is also a training image" in caplog.text
    asks(kind, run_config(), {**node, "test-results": "off"})


def relabelled(part: Path, folder: Path, label: int) -> Path:
    """A copy of a part whose first image has another label; -1: none."""
    stored = Dataset.load_from_disk(str(part))
    labels = [label, *stored["label"][1:]]
    column = Dataset.from_dict({"label": labels}, features=Features(label=stored.features["label"]))
    Dataset.from_dict(
        {**stored.remove_columns("label").to_dict(), **column.to_dict()}, features=stored.features
    ).save_to_disk(folder)
    return folder


def trained_on(part: Path, **settings: Any) -> set[bytes]:
    """The images of a part that a site with a guarantee trains on."""
    data = parse_run_config(run_config(**settings)).data
    place = NodeConfig(client_id="a", data_dir=str(part), epsilon=1.0)
    return {row["image"]["bytes"] for row in load_rows(data, place, "train", 0)}


@pytest.mark.parametrize("label", [1, -1])
def test_one_images_label_moves_no_other_image(tmp_path: Path, label: int) -> None:
    """From the class mouse to dog, or to none: the others stay on their side of the test."""
    for each in (10, 11, 24):
        place = tmp_path / f"{each}-{label}"
        rows(each=each).save_to_disk(place / "here")
        there = relabelled(place / "here", place / "there", label)
        (first,) = {row["image"]["bytes"] for row in stored_images(place / "here", 1)}
        moved = trained_on(place / "here") ^ trained_on(there)
        assert moved <= {first}


def stored_images(part: Path, count: int) -> Dataset:
    stored = Dataset.load_from_disk(str(part)).select(range(count))
    return stored.cast_column("image", ImageColumn(decode=False))


@pytest.mark.parametrize("kind", HANDLERS)
def test_one_image_decides_of_no_other_by_a_cap_or_a_group(
    part: Path, home: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    node = site(part, epsilon=1.0)
    with pytest.raises(PublicConfigError, match="data.max-per-class = 3: this site demands"):
        asks(kind, run_config(data__max_per_class=3), node)
    node["group-column"] = "patient"
    if kind in ("query.join", "train"):
        with pytest.raises(ClientError, match="^DATA"):
            asks(kind, run_config(data__group_column="patient"), node)
        assert "would move others into the test" in caplog.text


def test_a_client_is_not_named_after_its_rows(part: Path) -> None:
    """The domain's name would tell of a single row, without noise."""
    config = parse_run_config(
        run_config(data__name="hf:o/n", data__partition="domain", data__domain_column="patient")
    )
    patient_rows = rows().filter(lambda row: row["patient"] == PATIENTS[0])
    patient_rows.save_to_disk(part.with_name("one"))
    place = NodeConfig(data_dir=str(part.with_name("one")), partition_id=3)
    assert client_settings(config, place)[2] == "Ada_Abel"
    place = replace(place, epsilon=1.0, domain_column="patient")
    assert client_settings(config, place)[2] == "client-3"


def test_no_choice_of_classes_hides_a_training_image_in_the_test(
    tmp_path: Path, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The image trains as a mouse, and tests as a dog, which only another run asks for."""
    names = ClassLabel(names=["mouse", "dog", "cat"])
    train, test = (rows(seed).cast_column("label", names) for seed in (0, 1))
    test = Dataset.from_list([{**train[0], "label": 1}, *test.to_list()], features=test.features)
    assert train[0]["label"] == 0
    DatasetDict(train=train, test=test).save_to_disk(tmp_path / "part")
    node = site(tmp_path / "part", epsilon=1.0, test_results="exact", test_split="test")
    chosen = {"data__classes": "dog,mouse", "data__test_split": "test"}
    for classes in ("dog,mouse", "dog,cat"):
        with pytest.raises(ClientError, match="^DATA"):
            asks("query.join", run_config(**{**chosen, "data__classes": classes}), node)
        assert "is also a training image" in caplog.text
        caplog.clear()


@pytest.mark.parametrize("demand", [{}, {"epsilon": 1.0}, {"epsilon-total": 5.0}])
@pytest.mark.parametrize("says", ["", "exact", "off"])
def test_a_site_decides_whether_test_results_leave(
    part: Path, home: Path, demand: dict[str, float], says: str
) -> None:
    node = {**site(part, test_results=says), **demand}
    results = metrics_of(asks("evaluate", run_config(), node))
    is_exact = says == "exact" or (not says and not demand)
    assert set(results) == ({"seconds", "confusion"} if is_exact else {"seconds", WITHHELD})
    # The run has an epsilon
    assert results["seconds"] == 0


def test_a_withheld_test_cannot_fail(
    part: Path, home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node = site(tmp_path / "gone", epsilon=1.0)
    assert metrics_of(asks("evaluate", run_config(), node)) == {"seconds": 0.0, WITHHELD: 1}
    assert "the test for this site alone failed" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("silent", [1, 2])
def test_a_run_goes_on_without_test_results(
    home: Path, part: Path, silent: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The averages are of the others, and the report names who withholds; of nobody, there are
    none.
    """
    caplog.set_level(logging.INFO)
    sites = [{**site(part), "client-id": f"site-{k}"} for k in range(2)]
    for node in sites[:silent]:
        node["epsilon"] = 1.0
    config = run_config(num_clients=2)
    run_job(LoopGrid(app, config, sites), parse_run_config(config), "job")
    folder = home / "runs" / "job"
    results = json.loads((folder / "metrics.json").read_text())
    names = [f"site-{k}" for k in range(silent)]
    assert results["withheld"] == names
    assert results["not_tested"] == []
    accuracy = results["accuracy"]["FedPFT"]
    assert set(accuracy) == {"average", *(f"site-{k}" for k in range(silent, 2))}
    page = (folder / "report.html").read_text()
    assert f"The sites of {', '.join(names)} withhold their test results" in page
    assert "nan" not in page.lower().replace("nand", "")
    assert f"test results are withheld by {', '.join(names)}" in caplog.text
    assert torch.isnan(torch.tensor(accuracy["average"])) == (silent == 2)
