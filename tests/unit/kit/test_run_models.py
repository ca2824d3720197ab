"""All models that a run loads are listed once, and checked alike by all who ask before a run."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from client_app.app import check_node, client_settings
from osfl.cli import doctor, estimate, preflight
from osfl.config import ConfigError, RunConfig, parse_node_config, parse_run_config
from osfl.kit.check import check_steps
from osfl.kit.kits import KitError
from osfl.kit.run_check import check_initial_weights
from osfl.kit.shapes import kit_shapes
from osfl.kit.used_parts import parts_by_step, run_models
from osfl.methods import CLIP
from osfl.models.classifiers import ClassifierError, build_classifier, new_classifier
from osfl.models.diffusion import DDIMScheduler, load_kit, timesteps
from server_app.app import check_server
from tests.helpers.encoder_folders import save_whole_clip
from tests.helpers.hub_requests import weights_of
from tests.helpers.loopback_hub import Hub
from tests.helpers.settings import ROOT, quick
from tests.helpers.whole_runs import nodes

NET = "shufflenet_v2_x1_0"
# The method, the key, the part of the digits' kit that is named apart, and who loads it
NAMED = {
    "captioner": ("oscar", "captioner", "clients"),
    "image-encoder": ("espresso", "image_encoder", "clients"),
    "synthesis.tiny-decoder": ("prompts-only", "tiny_decoder", "server"),
    "synthesis.lora": ("prompts-only", "lora", "server"),
    "zero-shot.clip": ("zero-shot", "clip", "server"),
    "classifier.init": ("local", "classifiers", "clients"),
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSFL_CACHE", str(tmp_path / "cache"))


def named_apart(key: str, folder: Path) -> tuple[RunConfig, Path]:
    """A run that names a model of its own, and the model's file of weights."""
    method, part, _ = NAMED[key]
    source = ROOT / "kits" / "digits"
    if key == "classifier.init":
        folder.mkdir()
        file = folder / f"{NET}.safetensors"
        save_file(build_classifier(NET, 10, True).state_dict(), file)
    elif key == "zero-shot.clip":
        file = save_whole_clip(folder) / "model.safetensors"
    else:
        shutil.copytree(source / part, folder)
        if key == "image-encoder":
            shutil.copytree(source / "feature_extractor", folder, dirs_exist_ok=True)
        (file,) = folder.glob("*.safetensors")
    settings = {"method": method, "kit": str(source), key: str(folder), "num-clients": 2}
    return parse_run_config({**quick(), **settings}), file


def ask_doctor(config: RunConfig, runs: Path) -> None:
    for finding in doctor.check_models(config):
        if finding.state == doctor.FAIL:
            raise ConfigError(finding.text)


def ask_preflight(config: RunConfig, runs: Path) -> None:
    preflight.check_simulation(config, runs)


def ask_dry_run(config: RunConfig, runs: Path) -> None:
    estimate.estimate_run(config, simulated=True)


def ask_node_or_server(config: RunConfig, runs: Path) -> None:
    node = parse_node_config(nodes(2)[0])
    check_node(client_settings(config, node)[0], node)
    check_server(config)


def without_last(file: Path) -> None:
    state = load_file(file)
    save_file({name: state[name] for name in list(state)[:-1]}, file)


def under_a_prefix(file: Path) -> None:
    save_file({f"module.{name}": value for name, value in load_file(file).items()}, file)


def gone(file: Path) -> None:
    file.unlink()


@pytest.mark.parametrize("key", NAMED)
@pytest.mark.parametrize("harm", [without_last, under_a_prefix, gone])
def test_all_who_ask_before_a_run_refuse_a_model_that_is_named_apart(
    home: Path, tmp_path: Path, key: str, harm: Callable[[Path], None]
) -> None:
    config, file = named_apart(key, tmp_path / "apart")
    assert key in [model.key for model in run_models(config)]
    ask_doctor(config, home / "runs")
    harm(file)
    for ask in (ask_doctor, ask_preflight, ask_dry_run, ask_node_or_server):
        with pytest.raises((ClassifierError, ConfigError, KitError), match="apart"):
            ask(config, home / "runs")


def test_a_run_lists_every_model_that_it_names(tmp_path: Path) -> None:
    listed = {}
    for key, (_, part, side) in NAMED.items():
        config, _ = named_apart(key, tmp_path / key)
        (model,) = [model for model in run_models(config) if model.key == key]
        listed[key] = (model.loaded_by, model.parts or ("classifiers",))
        assert model.source == str(tmp_path / key)
        assert (side, (part,)) == listed[key]
    statistics = parse_run_config(quick(method="fedcgs"))
    init_models = [(m.loaded_by, m.key) for m in run_models(statistics) if m.classifier]
    assert init_models == [("server", "classifier.init"), ("clients", "classifier.init")]


@pytest.mark.slow
def test_a_model_of_the_hub_is_checked_by_its_settings_until_it_is_fetched(
    served: Hub, home: Path, tmp_path: Path
) -> None:
    """And does not hide another model that does not fit."""
    config, file = named_apart("synthesis.tiny-decoder", tmp_path / "apart")
    settings = {**quick(method="oscar", captioner="owner/blip"), "kit": "digits"}
    settings["synthesis.tiny-decoder"] = str(file.parent)
    config = parse_run_config(settings)
    _, models = doctor.check_models(config)
    assert "owner/blip, of which a run will fetch 0." in models.text
    assert preflight.check_simulation(config, home / "runs") == []
    assert weights_of(served) == []
    under_a_prefix(file)
    for ask in (ask_doctor, ask_preflight):
        with pytest.raises((ConfigError, KitError), match="begin with 'module.'"):
            ask(config, home / "runs")
    assert weights_of(served) == []


def test_initial_weights_are_checked_once_without_their_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, file = named_apart("classifier.init", tmp_path / "apart")
    check_initial_weights(config.classifier, "", "classifier.init")
    new_classifier(config.classifier, 3, "", 0)
    monkeypatch.setattr("osfl.models.classifiers.load_initial_weights", None)
    check_initial_weights(config.classifier, "", "classifier.init")
    state = load_file(file)
    save_file({**state, "conv1.0.weight": torch.zeros(1)}, file)
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        check_initial_weights(config.classifier, "", "classifier.init")


@pytest.mark.slow
def test_runs_with_the_shipped_kit_are_checked_without_the_models_libraries(
    tmp_path: Path,
) -> None:
    code = (
        "import io, sys\n"
        "from osfl.cli.preflight import main\n"
        "for request in sys.argv[1:]:\n"
        "    sys.stdin = io.StringIO(request)\n"
        "    status = main()\n"
        "    print(status, sorted({'diffusers', 'transformers', 'peft'} & set(sys.modules)))\n"
    )
    requests = [
        json.dumps({"overrides": {"method": method}, "runs": str(tmp_path / "runs")})
        for method in ("feddeo", "domain-vector", "fedcgs", "fedlmg", "espresso")
    ]
    result = subprocess.run(
        [sys.executable, "-c", code, *requests], cwd=ROOT, capture_output=True, text=True
    )
    assert result.stdout.splitlines() == ["0 []"] * len(requests), result.stderr[-2000:]


@pytest.mark.parametrize("spacing", ["leading", "linspace", "trailing"])
@pytest.mark.parametrize("offset", [0, 1])
def test_the_first_timestep_is_the_librarys(spacing: str, offset: int) -> None:
    """Too many steps are refused by the settings alone, exactly where the schedule would end."""
    settings = {"num_train_timesteps": 20, "timestep_spacing": spacing, "steps_offset": offset}
    for steps in range(1, 21):
        scheduler = DDIMScheduler(**settings)
        scheduler.set_timesteps(steps)
        if int(scheduler.timesteps.max()) < 20:
            check_steps(settings, steps)
            assert timesteps(scheduler, steps)
        else:
            with pytest.raises(KitError, match=f"steps = {steps}: "):
                check_steps(settings, steps)
    with pytest.raises(KitError, match="steps = 21: "):
        check_steps(settings, 21)


def test_a_kits_sizes_are_those_of_the_loaded_one(tiny_kit: Path) -> None:
    kit = load_kit(tiny_kit)
    assert kit_shapes(str(tiny_kit))[:2] == (kit.text.shape, kit.latent_shape)


def test_the_server_needs_the_embeddings_noise_of_a_secure_sum(
    tiny_kit: Path, tiny_unclip: Path, tmp_path: Path
) -> None:
    """FedDISC's sum has mean embeddings, and the server would miss their noise after the round."""
    unclip = tmp_path / "unclip"
    shutil.copytree(tiny_unclip, unclip)
    shutil.rmtree(unclip / "image_normalizer")
    settings = {"method": "feddisc", "kit": str(tiny_kit), "feddisc__kit": str(unclip)}
    check_server(parse_run_config(quick(**settings)))
    summed = {"secure_sum": True, "num_clients": 3, "min_clients": 3}
    with pytest.raises(KitError, match="image_normalizer"):
        check_server(parse_run_config(quick(**settings, **summed)))


def test_a_clip_that_teaches_a_mixed_run_is_listed(tmp_path: Path) -> None:
    """Also in the digests that bind a job to its kit, beside the initial weights."""
    mixed = {"method": "mixed", "mixed.methods": "votes", "mixed.teacher": "zero-shot"}
    named = parse_run_config({**quick(), **mixed, "zero-shot.clip": str(tmp_path)})
    models = [model for model in run_models(named) if model.key == "zero-shot.clip"]
    assert [(model.source, model.parts) for model in models] == [(str(tmp_path), (CLIP,))]
    assert CLIP not in parts_by_step(named)["models"][1]
    of_kit = parse_run_config({**quick(), **mixed})
    untaught = parse_run_config({**quick(), **mixed, "mixed.teacher": ""})
    assert parts_by_step(of_kit)["models"][1] == (*parts_by_step(untaught)["models"][1], CLIP)
    assert not [model for model in run_models(untaught) if CLIP in model.parts]
