"""docs/configuration.md is what docs/generate.py makes, and says what every key means."""

import json
import re
import runpy

import pytest

from osfl.config import NOT_IDENTITY, installed_defaults, node_schema, schema
from osfl.util.markers import Doc, markers_of
from tests.helpers.settings import ROOT, defaults

PAGE = (ROOT / "docs" / "configuration.md").read_text()
# Sections that have all keys of another one
SAME_KEYS = {"global-model": "classifier", "fedcado": "fedlmg"}


def items() -> dict[str, tuple[str, str, str]]:
    """(default, notes, mark) of every key's list item, by key; node-config's keys as "node key"."""
    listed: dict[str, tuple[str, str, str]] = {}
    for part, prefix in zip(PAGE.split("## Node-config"), ("", "node "), strict=True):
        for key, default, mark, notes in re.findall(
            r"^- `([\w.-]+)=(.*?)`ˢ?(ᵐ?)(?: \(((?:`[^`]*`|[^)`])*)\))?: \S", part, re.MULTILINE
        ):
            listed[prefix + key] = default, notes, mark
    return listed


def base_key(key: str, section: str) -> str:
    """Return the key of the other section that a section's key repeats; "" for another's key."""
    head, _, name = key.partition(".")
    return f"{SAME_KEYS[section]}.{name}" if head == section else ""


def test_the_page_is_fresh() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "generate.py"))["page"]()
    assert page == PAGE, "docs/configuration.md is stale: make docs-pages"


def test_every_key_has_a_meaning() -> None:
    for key, annotated in {**schema(), **node_schema()}.items():
        (doc,) = markers_of(annotated, Doc)
        assert re.fullmatch(r"[^|\n]*\S[.)]", doc.meaning), key
        # Outside of code, Markdown takes an angle bracket for HTML
        assert "<" not in re.sub(r"`[^`]*`", "", doc.meaning), key


def test_every_key_is_listed_with_its_default() -> None:
    listed = items()
    inherited = {
        key for key in schema() for section in SAME_KEYS if base_key(key, section) in schema()
    }
    run_keys = set(schema()) - inherited
    assert {"global-model.lr", "fedcado.guidance"} <= inherited
    assert {"classifier.lr", "fedcado.noise-edits"} <= run_keys
    assert set(listed) == run_keys | {f"node {key}" for key in node_schema()}
    values = {**defaults(), **installed_defaults("mixed")}
    for key in run_keys:
        assert listed[key][0] == json.dumps(values[key])
        assert (listed[key][2] == "ᵐ") == (key in NOT_IDENTITY)
    assert listed["feddeo.lr"] == ("0.1", "1e-08–1,000", "")
    solvers = '`"ddim"`, `"dpm-solver++"`, `"unipc"`, `"lcm"`, `"tcd"`'
    assert listed["synthesis.solver"][1].startswith(solvers)
    assert listed["synthesis.cache-interval"][1].endswith("*approximate* but for `1`")


@pytest.mark.parametrize("name", SAME_KEYS)
def test_a_section_with_the_keys_of_another_lists_its_other_defaults(name: str) -> None:
    values = defaults()
    section = PAGE.split(f"## `[{name}]`")[1].split("\n## ")[0]
    assert f"the keys of `[{SAME_KEYS[name]}]`" in section
    listed = dict(re.findall(rf"`({name}\.[\w-]+)=(.*?)`", section))
    changes = {
        key: json.dumps(value)
        for key, value in values.items()
        if key.startswith(f"{name}.") and values.get(base_key(key, name)) != value
    }
    assert listed == changes
