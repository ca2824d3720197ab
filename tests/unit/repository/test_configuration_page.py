"""docs/configuration.md is what docs/generate.py makes, and says what every key means."""

import json
import re
import runpy

from osfl.config import NOT_IDENTITY, node_schema, schema
from osfl.config.markers import Doc, markers_of
from tests.helpers.settings import ROOT, defaults

PAGE = (ROOT / "docs" / "configuration.md").read_text()


def rows() -> dict[str, list[str]]:
    """The cells of every key's row, by key.

    Node-config, whose keys may be the same, by "node key".
    """
    found: dict[str, list[str]] = {}
    for part, prefix in zip(PAGE.split("## Node-config"), ("", "node "), strict=True):
        for line in re.findall(r"^\| `.*$", part, re.MULTILINE):
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            found[prefix + cells[0].strip("|` ")] = cells
    return found


def test_the_page_is_fresh() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "generate.py"))["page"]()
    assert made == PAGE, "docs/configuration.md is stale: make docs-pages"


def test_every_key_has_a_meaning() -> None:
    for key, annotated in {**schema(), **node_schema()}.items():
        (doc,) = markers_of(annotated, Doc)
        assert re.fullmatch(r"[^|\n]*\S[.)]", doc.meaning), key
        # Outside of code, Markdown takes an angle bracket for HTML
        assert "<" not in re.sub(r"`[^`]*`", "", doc.meaning), key


def test_every_key_has_a_row_with_its_default() -> None:
    found = rows()
    assert set(found) == {*schema(), *(f"node {key}" for key in node_schema())}
    for key, value in defaults().items():
        assert found[key][1] == f"`{json.dumps(value)}`"
        assert ("may change" in found[key][-1]) == (key in NOT_IDENTITY)
    assert found["feddeo.lr"][1:3] == ["`0.1`", "1e-08 to 1,000"]
    assert found["synthesis.solver"][2] == '`"ddim"`, `"dpm-solver++"`, `"unipc"`, `"lcm"`, `"tcd"`'
    assert found["synthesis.cache-interval"][-1] == "approximate, but for `1`"
