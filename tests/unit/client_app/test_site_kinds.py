"""The kind of payload that a site of a mixed run chooses."""

from dataclasses import replace
from pathlib import Path

import pytest

from client_app import kinds
from client_app.errors import PublicConfigError
from client_app.kinds import Site, Work, check_kind, choose_kind, misfit
from osfl.config import NodeConfig, RunConfig, parse_run_config
from osfl.kit.folder import KitError
from tests.helpers.settings import quick

GB = 10**9
# A diffusion model of Stable Diffusion's size, and a captioner
LARGE = Work(4 * GB, learns=True)
SMALL = Work(GB, learns=False)
LAPTOP = Site(has_gpu=False, free_bytes=32 * GB, images=100, classes=10)


def run_of(methods: str) -> RunConfig:
    return parse_run_config({**quick(method="mixed"), "mixed.methods": methods})


@pytest.mark.parametrize(
    ("work", "site", "lack"),
    [
        (LARGE, LAPTOP, ""),
        (LARGE, replace(LAPTOP, free_bytes=16 * GB), ""),
        (LARGE, replace(LAPTOP, free_bytes=16 * GB - 1), "memory"),
        (LARGE, replace(LAPTOP, images=101), "device"),
        (LARGE, replace(LAPTOP, images=101, has_gpu=True), ""),
        (SMALL, replace(LAPTOP, images=400), ""),
        (SMALL, replace(LAPTOP, images=401), "device"),
        (LARGE, replace(LAPTOP, images=50), ""),
        (LARGE, replace(LAPTOP, images=49), "images"),
        (SMALL, replace(LAPTOP, images=49), ""),
        # A guarantee hides the number of images
        (LARGE, Site(has_gpu=False, free_bytes=32 * GB), ""),
        (LARGE, Site(has_gpu=False, free_bytes=GB), "memory"),
        (Work(0, learns=False), Site(has_gpu=False, free_bytes=0, images=1, classes=1), ""),
    ],
)
def test_a_kind_fits_by_memory_device_and_images(work: Work, site: Site, lack: str) -> None:
    assert misfit(work, site) == lack


def choose(
    methods: str,
    monkeypatch: pytest.MonkeyPatch,
    lacks: dict[str, str] | None = None,
    refused: tuple[str, ...] = (),
    cached: tuple[str, ...] = (),
) -> str:
    """Choose with a site that lacks something for some kinds, and would refuse others."""
    monkeypatch.setattr(kinds, "_site", lambda config, node: LAPTOP)
    monkeypatch.setattr(kinds, "_work", lambda config, kind, kit: kind)
    monkeypatch.setattr(kinds, "misfit", lambda kind, site: (lacks or {}).get(kind, ""))

    def kit_of(kind: str) -> str:
        if kind in refused:
            raise KitError("no such part")
        return "kit"

    return choose_kind(run_of(methods), NodeConfig(), kit_of, lambda kind: kind in cached)


def test_the_first_kind_that_fits_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    methods = "feddeo,domain-vector+fedcgs,oscar,votes"
    assert choose(methods, monkeypatch) == "feddeo"
    assert choose(methods, monkeypatch, {"feddeo": "memory"}) == "domain-vector+fedcgs"
    refused = ("feddeo", "domain-vector+fedcgs")
    assert choose(methods, monkeypatch, {"oscar": "device"}, refused) == "votes"
    # A cached payload comes before everything but the site's policy
    assert choose(methods, monkeypatch, {"oscar": "memory"}, cached=("oscar", "votes")) == "oscar"
    assert choose(methods, monkeypatch, refused=("oscar",), cached=("oscar",)) == "feddeo"


def test_a_simulation_assigns_kinds_to_its_clients() -> None:
    values = {
        **quick(method="mixed"),
        "mixed.methods": "feddeo,oscar",
        "mixed.assignment": "cyclic",
    }
    config = parse_run_config(values)

    def choice(**node: object) -> str:
        site = NodeConfig(device="cpu", **node)  # type: ignore[arg-type]
        return choose_kind(config, site, lambda kind: "", lambda kind: kind == "feddeo")

    assert [choice(partition_id=number, num_partitions=3) for number in range(3)] == [
        "feddeo",
        "oscar",
        "feddeo",
    ]
    # A site's own choice counts, and a real site has no number
    assert choice(partition_id=0, num_partitions=3, method="oscar") == "oscar"
    assert choice() == "feddeo"


def test_a_site_that_nothing_fits_is_told_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The site's log has the reason, which the server does not get."""
    match = r"none of feddeo, oscar fits .* \(oscar lacks policy or parts; feddeo lacks images\)"
    with pytest.raises(PublicConfigError, match=match):
        choose("feddeo,oscar", monkeypatch, {"feddeo": "images"}, refused=("oscar",))
    assert "cannot send a payload of kind oscar: no such part" in caplog.text


def test_a_named_kind_must_be_welcome_and_its_own() -> None:
    config = run_of("feddeo,oscar")
    assert check_kind("oscar", config, NodeConfig(method="oscar")) == "oscar"
    assert check_kind("oscar", config, NodeConfig()) == "oscar"
    with pytest.raises(PublicConfigError, match="'votes': this run welcomes feddeo, oscar"):
        check_kind("votes", config, NodeConfig())
    with pytest.raises(PublicConfigError, match="'oscar': the server asks this site for feddeo"):
        check_kind("feddeo", config, NodeConfig(method="oscar"))


def test_a_site_is_measured_without_torch_on_a_cpu(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a guarantee not even the labels are read."""
    config = run_of("votes")
    node = NodeConfig(partition_id=0, num_partitions=2, device="cpu")
    site = kinds._site(config, node)
    assert (site.has_gpu, site.images, site.classes) == (False, 30, 10)
    assert site.free_bytes > 0
    private = kinds._site(config, replace(node, epsilon=1.0))
    assert (private.images, private.classes) == (None, None)
