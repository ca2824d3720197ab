"""The schema: every key has a default in pyproject.toml, every bad value is named."""

import re
import tomllib

import pytest

from osfl.config import (
    NOT_IDENTITY,
    ConfigError,
    all_parts,
    approximations,
    flatten,
    installed_defaults,
    kinds_of,
    parse_node_config,
    parse_run_config,
    payload_settings,
    resolve_auto,
    schema,
)
from osfl.config.parse import RENAMED, new_key
from osfl.settings import resolve_config
from tests.helpers.settings import ROOT, defaults


def test_only_some_keys_may_change_at_a_resumption() -> None:
    """A key that joins or leaves the set changes which runs can be resumed: on purpose alone."""
    settings = {
        "advise",
        "checkpointing",
        "continue-from",
        "continue-from-model",
        "deadline",
        "device",
        "client-contribution",
        "job-id",
        "join-timeout",
        "local-baseline",
        "max-images",
        "max-payload-mb",
        "mlflow-uri",
        "min-clients",
        "new-clients",
        "payloads-from",
        "replace-clients",
        "runs-dir",
        "sealing-key",
        "sealed-store",
        "signatures",
        "test-specificity",
        "test-timeout",
        "tracking",
    }
    assert settings | {
        "personalization.batch-size",
        "personalization.lr",
        "personalization.steps",
        "synthesis.checkpointing",
        "synthesis.overlap",
        "synthesis.ray-address",
        "synthesis.workers",
    } == set(NOT_IDENTITY)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, []),
        ({"synthesis.solver": "unipc"}, ["solver unipc"]),
        (
            {"synthesis.guided-from": 10, "synthesis.guided-to": 800},
            ["guidance only at timesteps 10 to 800"],
        ),
        (
            {"method": "fedcado", "fedcado.gradient": "x0", "synthesis.tiny-decoder": "kit"},
            ["guidance through a tiny decoder", "the classifier's gradient at x0"],
        ),
        ({"method": "fedlmg", "fedcado.gradient": "x0"}, []),
        ({"method": "feddeo", "synthesis.tiny-decoder": "kit"}, []),
    ],
)
def test_approximations_are_reported(given: dict, words: list[str]) -> None:
    """Keys of the method's own section count alone, where the key matters to the method."""
    assert approximations({**defaults(), **given}) == words
    if "method" in given:
        assert approximations(given) == words


def test_defaults_and_schema_have_the_same_keys() -> None:
    # A mixed run's own keys have their defaults in its section
    assert {*defaults(), *installed_defaults("mixed")} == set(schema())


def test_parsing_and_flattening_are_inverse() -> None:
    assert flatten(parse_run_config(defaults())) == resolve_auto(defaults())


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("seeed", 1, "seeed: unknown key (did you mean seed?)"),
        ("init", "none", "init: unknown key (did you mean classifier.init?)"),
        ("robust", "exclude", "robust: renamed to defense"),
        ("adaptation.lr", 0.1, "adaptation.lr: renamed to personalization.lr"),
        ("left-out", "client-0", "left-out: renamed to held-out"),
        (
            "method",
            "magic",
            "method = 'magic': must be one of prompts-only, prompts-domain, feddeo",
        ),
        ("seed", -1, "seed = -1: must be between 0"),
        ("seed", 1.5, "seed = 1.5: must be a whole number"),
        ("seed", "one", "seed = 'one': must be a whole number"),
        ("seed", True, "seed = True: must be a whole number"),
        ("num-clients", 0, "num-clients = 0: must be between 1"),
        ("feddeo.lr", 0.0, "feddeo.lr = 0.0: must be between 1e-08"),
        ("feddeo.lr", float("nan"), "feddeo.lr = nan: must be between"),
        ("classifier.small-stem", "yes", "classifier.small-stem = 'yes': must be true or false"),
        (
            "data.partition",
            "magic",
            "data.partition = 'magic': must be one of domain, label, dirichlet, dirichlet-domain, "
            "iid",
        ),
        ("synthesis.prompt", "an image", "synthesis.prompt = 'an image': must contain {class}"),
        ("fedlmg.strategies", "ft,xx", "fedlmg.strategies = 'ft,xx': must name some of ft, md, sd"),
        ("min-clients", 9, "min-clients = 9: must be at most num-clients = 2"),
        ("job-id", "../etc", "job-id = '../etc': must be 1 to 64 letters"),
        ("job-id", "..", "job-id = '..': must be 1 to 64 letters"),
        (
            "data.classes",
            "cat,dog",
            "data.classes = 'cat,dog': must be empty with data.name = 'digits'",
        ),
        ("runs-dir", "runs", "runs-dir = 'runs': must be an absolute path"),
        ("synthesis.steps", 1000, "synthesis.steps = 1000: must be between 2 and 999"),
        ("fedcado.strategies", "", "fedcado.strategies = '': must name some of ft, md, sd"),
        ("data.root", "sites", "data.root = 'sites': must be an absolute path"),
        ("rounds.proxy", "web", "rounds.proxy = 'web': must be an absolute path"),
        (
            "classifier.init",
            "w.pth",
            "classifier.init = 'w.pth': must be kit, imagenet, pretrained, none, or the",
        ),
        (
            "global-model.init",
            "w.pth",
            "global-model.init = 'w.pth': must be kit, imagenet, pretrained, none, or the",
        ),
        (
            "kit",
            "./kit",
            "kit = './kit': must be a shipped kit's name, an absolute path or a hub id",
        ),
        (
            "prompts-domain.prompt",
            "a {class}",
            "prompts-domain.prompt = 'a {class}': must contain {class} and {domain}",
        ),
        ("fgl.prompt", "a {class}", "fgl.prompt = 'a {class}': must contain {caption}"),
        (
            "espresso.inversion-guidance",
            6.0,
            "espresso.inversion-guidance = 6: must be below espresso.guidance = 2",
        ),
        ("classifier.architecture", " , ", "classifier.architecture: must name at least one"),
        (
            "global-model.architecture",
            "resnet18,vgg16",
            "global-model.architecture = 'resnet18,vgg16': must name one",
        ),
        (
            "data.name",
            "folder",
            "data.classes: must list at least two names",
        ),
    ],
)
def test_bad_values_are_named(key: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run_config({**defaults(), key: value})  # type: ignore[dict-item]
    assert message in str(caught.value)


RANDOM = {"classifier.init": "none", "global-model.init": "none"}


@pytest.mark.parametrize(
    ("method", "section"),
    [
        ("fedavg", "classifier"),
        ("local", "classifier"),
        ("fedcgs", "classifier"),
        ("fedpft", "classifier"),
        ("ceiling", "global-model"),
    ],
)
def test_digits_weights_are_not_what_photographs_begin_with(method: str, section: str) -> None:
    settings = {**defaults(), "data.name": "folder", "data.classes": "cat,dog", "method": method}
    message = f"{section}.init = 'kit': the weights in kits/digits are of digits"
    with pytest.raises(ConfigError, match=message):
        parse_run_config(settings)
    # Only where the method begins with them
    assert parse_run_config({**settings, f"{section}.init": "none"}).method == method
    assert parse_run_config({**settings, "kit": "/models/mine"}).method == method


def test_feddf_does_not_distil_photographs_on_digits() -> None:
    folders = {"data.name": "folder", "data.classes": "cat,dog", "method": "feddf", **RANDOM}
    with pytest.raises(ConfigError, match="rounds.proxy = 'public': those images are digits"):
        parse_run_config({**defaults(), **folders})
    assert (
        parse_run_config({**defaults(), **folders, "rounds.proxy": "/data/web"}).rounds.proxy
        == "/data/web"
    )


@pytest.mark.parametrize(("method", "key"), [("oscar", "kit"), ("feddisc", "feddisc.kit")])
def test_digits_are_not_drawn_for_other_images(method: str, key: str) -> None:
    overrides = {"data.name": "folder", "data.classes": "cat,dog", "method": method, **RANDOM}
    folders = {**defaults(), **overrides}
    with pytest.raises(ConfigError, match=f"{key} = 'digits.*': it draws digits"):
        parse_run_config(folders)
    assert parse_run_config({**folders, key: "/models/mine"}).method == method
    assert parse_run_config({**folders, "method": "local"}).kit == "digits"


def test_a_class_named_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="'cat' is listed twice"):
        parse_run_config({**defaults(), "data.name": "folder", "data.classes": "cat,dog,cat"})


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ("cat,a/b", "data.classes: 'a/b' has a slash; a class's name is that of its folder"),
        ("cat,a\\b", "has a slash"),
        ("cat,..", "'..' begins with '.'"),
        ("cat,-rf", "'-rf' begins with '-'"),
        ("cat,a\0b", "'a\ufffdb' has a character that cannot be printed"),
        ("cat,a\nb", "'a b' has a character that cannot be printed"),
        ("cat,a\u202eb", "'a\ufffdb' has a character that cannot be printed"),
        ("cat," + "x" * 101, "has 101 bytes, more than 100"),
        ("cat,dog,Cat", "'cat' and 'Cat' differ only in case"),
        ("straße,STRASSE", "'straße' and 'STRASSE' differ only in case"),
    ],
)
def test_a_class_is_a_folder_and_a_word(classes: str, message: str) -> None:
    """On every disk, and without a character that would reach a terminal through a log."""
    folders = {**defaults(), "data.name": "folder", "method": "local", **RANDOM}
    with pytest.raises(ConfigError) as caught:
        parse_run_config({**folders, "data.classes": classes})
    assert message in str(caught.value)
    assert "rename" in str(caught.value)
    assert str(caught.value).replace("\n", "").isprintable()
    assert parse_run_config({**folders, "data.classes": "alarm_clock,Real World,7,T-shirt"})


def test_all_problems_come_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run_config({**defaults(), "seed": -1, "feddeo.lr": "fast"})
    assert "seed = -1" in str(caught.value)
    assert "feddeo.lr = 'fast'" in str(caught.value)


def test_a_missing_key_is_named() -> None:
    values = defaults()
    del values["seed"]
    with pytest.raises(ConfigError, match="seed: missing"):
        parse_run_config(values)


def test_node_config() -> None:
    assert parse_node_config({"partition-id": 3, "data-dir": "/data"}).partition_id == 3
    # As NVFlare starts Flower's nodes
    by_nvflare = {"client-name": "site-1", "partition-id": 0, "num-partitions": 2}
    assert parse_node_config(by_nvflare).client_id == "site-1"
    assert parse_node_config({**by_nvflare, "client-id": "a"}).client_id == "a"
    with pytest.raises(ConfigError, match="client-id"):
        parse_node_config({"client-name": 3})
    with pytest.raises(ConfigError, match="data-dri: unknown key .did you mean data-dir"):
        parse_node_config({"data-dri": "/data"})
    with pytest.raises(ConfigError, match="partition-id = 'x': must be a whole number"):
        parse_node_config({"partition-id": "x"})


def test_files_and_arguments_merge_from_left_to_right(tmp_path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "a.toml"
    file.write_text('method = "fedlmg"\nseed = 1\n[feddeo]\nlr = 0.5\n')
    config, overrides = resolve_config(
        [str(file), "seed=2", "classifier.small-stem=false", "runs-dir=/tmp/x"]
    )
    assert (config.method, config.seed, config.feddeo.lr, config.classifier.small_stem) == (
        "fedlmg",
        2,
        0.5,
        False,
    )
    assert overrides == {
        "method": "fedlmg",
        "seed": 2,
        "feddeo.lr": 0.5,
        "classifier.small-stem": False,
        "runs-dir": "/tmp/x",
    }


def test_lists_and_other_values_of_toml(tmp_path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "a.toml"
    file.write_text('kit = "/models/mine"\n[data]\nname = "folder"\nclasses = ["dog", "cat"]\n')
    assert resolve_config([str(file)])[0].data.classes == "dog,cat"
    file.write_text("[feddeo]\nlr = 2024-01-01\n")
    with pytest.raises(ConfigError, match=r"feddeo\.lr = 2024-01-01: must be a string, a number"):
        resolve_config([str(file)])
    assert resolve_config(['fedlmg.strategies=["ft", "md"]'])[0].fedlmg.strategies == "ft,md"


def test_images_must_have_a_class() -> None:
    with pytest.raises(ConfigError, match="are both 0: set one of them"):
        resolve_config(["feddeo.guidance-text=0", "feddeo.guidance-description=0"])


def test_bad_files_are_named(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=r"nothing\.toml.*no such file"):
        resolve_config(["nothing.toml"])
    broken = tmp_path / "broken.toml"
    broken.write_text("seed = = 1")
    with pytest.raises(ConfigError, match=r"broken\.toml: not valid TOML"):
        resolve_config([str(broken)])


@pytest.mark.parametrize(
    "file",
    sorted({*(ROOT / "configs").glob("*.toml"), *(ROOT / "configs" / "methods").glob("*.toml")}),
    ids=lambda f: f.name,
)
def test_every_shipped_config_is_valid(file) -> None:  # type: ignore[no-untyped-def]
    assert tomllib.loads(file.read_text())
    resolve_config([str(file)])


def test_renamed_keys_have_new_names_that_exist() -> None:
    for old, new in RENAMED.items():
        assert old not in schema()
        assert new.partition(",")[0] in schema()
    assert new_key("adaptation.steps") in schema()
    assert new_key("adaptation") == new_key("seed") == ""


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"tracking": "mlflow, wandb"}, "'wandb' must be one of tensorboard, mlflow"),
        ({"mlflow-uri": "https://me:word@host"}, r"'https://\*\*\*@host': must be without"),
        ({"mlflow-uri": "https://host/?token=word"}, "must be without credentials, query"),
        ({"mlflow-uri": "http://me:pa word@host"}, r"'http://\*\*\*@host': must be without"),
        ({"mlflow-uri": "http://host#key=word"}, "must be without .* fragment and white space"),
    ],
)
def test_trackers_are_known_and_their_uris_hold_no_secrets(given: dict, problem: str) -> None:
    """A run-config is stored in plain text, and sent to every client."""
    with pytest.raises(ConfigError, match=problem) as caught:
        parse_run_config({**defaults(), **given})
    assert "word" not in str(caught.value)


@pytest.mark.parametrize(
    ("methods", "settings", "message"),
    [
        ("", {}, "mixed.methods = '': must name at least one kind"),
        ("feddeo,feddeo", {}, "list each kind once"),
        ("magic", {}, "'magic' must be a method"),
        ("fedavg", {}, "'fedavg' is iterative"),
        ("prompts-only", {}, "'prompts-only' has no payload"),
        ("mixed", {}, "'mixed' has no payload"),
        ("local", {}, "'local' trains no global model"),
        ("oscar,feddisc", {}, "'feddisc' samples with a kit of its own"),
        ("fedcgs", {}, "'fedcgs' makes no images; put it behind a method that does"),
        ("feddeo+oscar", {}, "'oscar' makes images itself; put it first"),
        ("feddeo+fedcgs+fedpft", {}, "must join at most 2 different methods"),
        ("oscar,espresso", {"synthesis.solver": "unipc"}, "Espresso requires 'ddim'"),
        ("feddeo,fgl", {"epsilon": 1.0}, "method 'fgl' gives no guarantee"),
        ("oscar", {"mixed.teacher": "fedcgs"}, "must be a method in mixed.methods that sends"),
        (
            "oscar+fedcgs",
            {"mixed.teacher": "fedcgs", "global-model.mixing": "mixup"},
            "requires global-model.mixing = 'none'",
        ),
    ],
)
def test_kinds_that_cannot_be_mixed_are_refused_by_name(
    methods: str, settings: dict, message: str
) -> None:
    values = {**defaults(), "method": "mixed", "mixed.methods": methods, **settings}
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_run_config(values)


def test_a_part_of_a_mixed_run_has_the_settings_of_a_pure_run() -> None:
    values = {**defaults(), "payload-codec": "int8"}
    mixed = parse_run_config(
        {**values, "method": "mixed", "mixed.methods": "oscar+fedcgs,votes,oscar"}
    )
    parts = all_parts(mixed)
    assert list(parts) == ["oscar", "fedcgs", "votes"]
    assert kinds_of(mixed) == ("oscar+fedcgs", "votes", "oscar")
    assert parts["oscar"] == parse_run_config({**values, "method": "oscar"})
    assert parts["fedcgs"] == parse_run_config({**values, "method": "fedcgs"})
    # Payloads without numbers have no codec
    assert parts["votes"] == parse_run_config({**values, "method": "votes", "payload-codec": "raw"})
    assert parse_run_config(flatten(mixed)) == mixed
    settings = payload_settings(mixed)
    assert settings["mixed.methods"] == "oscar+fedcgs,votes,oscar"
    assert (settings["method"], settings["payload-codec"]) == ("mixed", "int8")
    assert set(payload_settings(parts["votes"])) <= set(settings)
    assert not {"mixed.teacher", "oscar.guidance"} & set(settings)


def test_approximations_of_all_kinds_are_listed() -> None:
    values = {**defaults(), "method": "mixed", "fedlmg.gradient": "x0"}
    assert approximations({**values, "mixed.methods": "oscar,fedlmg"}) == [
        "the classifier's gradient at x0"
    ]
    assert approximations({**values, "mixed.methods": "oscar"}) == []
