"""Units: what is sampled together.

Units that stand for ever, and units that mix the classes for their statistics.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from osfl.config import parse_run_config
from osfl.data.digits import CLASSES
from osfl.models import classifiers
from osfl.models.diffusion import Kit
from osfl.payload.kinds import Classifier
from osfl.run_folder.layout import open_run_folder
from osfl.run_folder.status import Status
from server_app import distillation
from server_app.context import ServerJob
from server_app.methods import fedlmg
from server_app.synthesis.guidance import as_teacher, classifier_loss
from server_app.synthesis.plan import ImageJob, cut_units, mix_classes, plan_images
from tests.helpers.batch_norm import bn_model
from tests.helpers.settings import quick

HELD = {"b": [3, 1, 7], "a": range(10)}
SAMPLED = (
    *("prompts-only", "prompts-domain", "feddeo", "fedlmg", "fedcado", "oscar", "oscar-pooled"),
    *("espresso", "fgl", "feddisc", "fedbip"),
)


def test_units_and_seeds_are_fixed_for_ever() -> None:
    """A change here makes every committed image of every run anew."""
    records = []
    for method in SAMPLED:
        plan = plan_images(method, 5, HELD, 6)
        units = cut_units(plan, 8, {"a": "x", "b": "y"}, {"steps": 20, "method": method})
        seeds = [job.noise_seed for unit in units for job in unit.jobs]
        records.append([method, [unit.name for unit in units], seeds])
    digest = hashlib.sha256(json.dumps(records).encode()).hexdigest()
    assert digest == "253c1aa856db8d25fc115568980c85973c900fd67329088df2918776b680321e"


def test_mixed_units_hold_the_classes_in_turn() -> None:
    """The same images with the same seeds.

    No class comes twice before every class has come once.
    """
    plan = plan_images("fedlmg", 0, HELD, 6)
    mixed = mix_classes(plan)
    assert set(mixed) == set(plan)
    assert len(mixed) == len(plan)
    for unit in cut_units(mixed, 8, {}, {}):
        assert len({job.client for job in unit.jobs}) == 1
        classes = len(HELD[unit.jobs[0].client])
        counts = torch.bincount(torch.tensor([job.label for job in unit.jobs]), minlength=10)
        assert counts.max() <= -(-len(unit.jobs) // classes)
    assert cut_units(mixed, 8, {}, {}) == cut_units(mix_classes(reversed(plan)), 8, {}, {})
    names = [{unit.name for unit in cut_units(p, 8, {}, {})} for p in (plan, mixed)]
    assert names[0].isdisjoint(names[1])


def test_statistics_of_a_mixed_unit_are_the_datas() -> None:
    """Class c is of the shade c.

    A unit of one class is far from the data's mean and variance, one of all classes has them.
    """
    shades = torch.linspace(-1, 1, 10)
    data = classifiers.normalize(shades.view(-1, 1, 1, 1).expand(-1, 3, 1, 2))
    model = bn_model(0.0, 1.0)
    model[0].running_mean = data.mean(dim=(0, 2, 3))  # type: ignore[index]
    model[0].running_var = data.var(dim=(0, 2, 3), unbiased=False)  # type: ignore[index]
    plan = plan_images("fedlmg", 0, {"a": range(10)}, 10)

    def losses(jobs: list[ImageJob]) -> list[float]:
        unit_losses = []
        for unit in cut_units(jobs, 10, {}, {}):
            labels = torch.tensor([job.label for job in unit.jobs])
            pictures = shades[labels].view(-1, 1, 1, 1).expand(-1, 3, 1, 2)
            zeros = torch.zeros_like(labels)
            loss = classifier_loss(as_teacher(model), pictures, zeros, 0.0, 1.0, None, "unit")
            unit_losses.append(loss[0].item())
        return unit_losses

    assert min(losses(plan)) > 1
    assert max(losses(mix_classes(plan))) == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("statistics", ["unit", "image"])
def test_fedlmg_mixes_the_classes_of_its_units_for_their_statistics_alone(
    home: Path,
    tiny_kit: Path,
    monkeypatch: pytest.MonkeyPatch,
    statistics: str,
) -> None:
    """Also in a run.

    Its manifest, what is trained on, and that a second run finds all units there.
    """
    config = parse_run_config(
        quick(
            method="fedlmg",
            kit=str(tiny_kit),
            synthesis__images_per_class=2,
            synthesis__unit_size=4,
            fedlmg__strategies="ft",
            fedlmg__bn_statistics=statistics,
        )
    )
    folder = open_run_folder(config, "job", 0)
    job = ServerJob(config, folder, Status(folder.path), ("a",))
    model = classifiers.build_classifier("shufflenet_v2_x1_0", 10, small_stem=True)
    names = ("one", "four", "six", "nine")
    payloads = {"a": Classifier(names, "shufflenet_v2_x1_0", model.state_dict())}
    units: list[list[int]] = []
    trained: list[list[int]] = []
    monkeypatch.setattr(
        distillation,
        "train_global",
        lambda job, name, pixels, labels, *rest: trained.append(labels.tolist()),
    )

    def paint(kit: Kit, jobs: Sequence[ImageJob], *rest: object) -> torch.Tensor:
        units.append([image.label for image in jobs])
        return torch.zeros(len(jobs), 3, 32, 32, dtype=torch.uint8)

    for _ in range(2):
        fedlmg.run_guided(job, payloads, config.fedlmg, paint)
    expected = [[1, 4, 6, 9]] * 2 if statistics == "unit" else [[1, 1, 4, 4], [6, 6, 9, 9]]
    assert units == expected
    assert trained == [expected[0] + expected[1]] * 2
    lines = (folder.path / "manifest.jsonl").read_text().splitlines()
    assert [CLASSES.index(json.loads(line)["class"]) for line in lines] == trained[0]
