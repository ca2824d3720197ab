"""Names of classes and domains in prompts."""

from types import SimpleNamespace

import pytest
import torch

from osfl.config import ConfigError, parse_run_config
from osfl.data.render import CLASSES, STYLES
from osfl.models.concepts import initial_prompts
from osfl.payload.kinds import Domain
from osfl.util.prompts import fill_prompt, to_words
from server_app.methods import fgl, prompts_domain
from tests.helpers.settings import defaults, quick

FOLDERS = ("alarm_clock", "hourglass", "Unicorn", "umbrella", "dog")


# Fmt: skip
def test_folder_names_become_words() -> None:
    names = ("alarm_clock", "art_painting", "Real World", "Real_World", "__eiffel__tower_", "dog")
    assert [to_words(name) for name in names] == [
        "alarm clock",
        "art painting",
        "real world",
        "real world",
        "eiffel tower",
        "dog",
    ]


@pytest.mark.parametrize(
    ("template", "filled"),
    [
        ("an image of {class}", "an image of alarm clock"),
        ("a {class}", "an alarm clock"),
        ("A {class}, a {domain}", "An alarm clock, an infograph"),
        ("a {domain} of a {class}", "an infograph of an alarm clock"),
        ("a big {class}", "a big alarm clock"),
        ("banana {class}", "banana alarm clock"),
        ("a {other} {class}", "a {other} alarm clock"),
        ("{class}, {caption}", "alarm clock, a {class} of 1_000"),
    ],
)
def test_a_template_is_filled(template: str, filled: str) -> None:
    names = {"class": "alarm_clock", "domain": "infograph"}
    assert fill_prompt(template, names, "a {class} of 1_000") == filled


# Fmt: skip
def test_the_article_goes_by_sound() -> None:
    names = (*FOLDERS, "uninhabited island", "ukulele", "ewe", "ear", "one way sign", "octopus")
    assert [fill_prompt("a {class}", {"class": name}) for name in names] == [
        "an alarm clock",
        "an hourglass",
        "a unicorn",
        "an umbrella",
        "a dog",
        "an uninhabited island",
        "a ukulele",
        "a ewe",
        "an ear",
        "a one way sign",
        "an octopus",
    ]


def test_a_clients_domain_cannot_name_another_placeholder() -> None:
    names = {"class": "dog", "domain": "{class} {caption}"}
    assert fill_prompt("a {domain} of a {class}", names, "x") == "a {class} {caption} of a dog"


def test_the_digits_have_the_prompts_that_their_kit_has_learned() -> None:
    """Names stood in the templates before they became words: "a infograph of a eight"."""
    config = defaults()
    text = config["synthesis.prompt"]
    domain = config["prompts-domain.prompt"]
    run = parse_run_config(quick())
    for name in CLASSES:
        assert run.prompts([name]) == [text.replace("{class}", name)]
        assert fill_prompt("a {class}", {"class": name}) == f"a {name}"
        assert name in initial_prompts([name])[0].split()
        for style in STYLES:
            plain = domain.replace("{domain}", style).replace("{class}", name)
            assert fill_prompt(domain, {"class": name, "domain": style}) == plain


def test_every_prompt_of_a_folders_classes_is_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text encoder's input, from the config, from prompts-domain, FGL and FedBiP."""
    classes = ("alarm_clock", "dog")
    settings = quick(data__name="folder", data__classes=",".join(classes), kit="/kit")
    job = SimpleNamespace(config=parse_run_config(settings), classes=classes, kit="/kit")
    image = SimpleNamespace(client="a", label=0, index=0)
    assert job.config.prompts(classes) == ["an image of alarm clock", "an image of dog"]
    assert fgl.prompt_of(job, ["a clock on a_table"], image) == "alarm clock, a clock on a_table"  # type: ignore[arg-type]
    assert "alarm clock" in initial_prompts(classes)[0]
    encoded: list[str] = []
    kit = SimpleNamespace(text=lambda texts: encoded.extend(texts))
    monkeypatch.setattr(prompts_domain, "load_engine", lambda *_: kit)
    monkeypatch.setattr(prompts_domain, "sample", lambda *_: torch.zeros(1))
    payloads = {"a": Domain(classes, "art_painting")}
    prompts_domain.sampler(job, torch.device("cpu"), payloads)([image])  # type: ignore
    assert encoded == ["an art painting of an alarm clock"]


def test_a_words_map_is_what_prompts_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every template; a class keeps its own name everywhere else."""
    settings = quick(
        data__name="folder", data__classes="mouse,dog", data__words="mouse=computer mouse, Art=art"
    )
    config = parse_run_config({**settings, "kit": "/kit"})
    assert config.prompts(["mouse", "dog"]) == ["an image of computer mouse", "an image of dog"]
    job = SimpleNamespace(config=config, classes=("mouse", "dog"))
    image = SimpleNamespace(client="a", label=0, index=0)
    assert fgl.prompt_of(job, ["a thing"], image) == "computer mouse, a thing"  # type: ignore[arg-type]
    texts: list[str] = []
    kit = SimpleNamespace(text=texts.extend)
    monkeypatch.setattr(prompts_domain, "load_engine", lambda *_: kit)
    monkeypatch.setattr(prompts_domain, "sample", lambda *_: torch.zeros(1))
    payloads = {"a": Domain(("mouse", "dog"), "Art")}
    job.kit = "/kit"
    prompts_domain.sampler(job, torch.device("cpu"), payloads)([image])  # type: ignore
    assert texts == ["an art of a computer mouse"]
    with pytest.raises(ConfigError, match="data.words = 'mouse': 'mouse' must be name=words"):
        parse_run_config({**settings, "kit": "/kit", "data.words": "mouse"})
