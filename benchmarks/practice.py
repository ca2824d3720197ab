"""Deliberate practice (Askari-Hemmat et al., arXiv 2502.15588): half of the images are drawn where
a model of the other half is unsure; to benchmarks/tables/practice.{md,json}.

python -m benchmarks.practice            # every scale
python -m benchmarks.practice 1 5        # some; the table keeps its other rows

domain-vector's images, thirty a class and client, with benchmarks.main_table's payloads of seed 0.
A model learns the first fifteen. The other fifteen are drawn again from the same noise, with the
gradient of that model's entropy added to every prediction by FedLMG's machinery:
e <- e - s sqrt(1 - a_t) grad_z H(f(D(x0hat))), for several scales s. All rows have the same first
half and as many steps. Accuracy is on the validation split. Interrupted, the same command goes on.
"""

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import cast

import torch
from torch.nn import functional as F

from benchmarks import TABLES, command_line, some_of, with_others, write_table
from benchmarks.clients import folder_name, sent
from benchmarks.curves import first_images, taught, tested
from benchmarks.main_table import config_of, settings_of
from benchmarks.server import drawn_by, job_in
from osfl.models.classifiers import logits_of, normalise
from osfl.models.diffusion import Kit, x0hat
from osfl.payload.kinds import DomainVector
from osfl.util.files import make_private_folder, write_atomically
from server_app.context import ServerJob
from server_app.methods.fedlmg import guided_prediction
from server_app.pipeline import plan_held_classes
from server_app.synthesis.engine import load_engine
from server_app.synthesis.guidance import Condition, compose
from server_app.synthesis.images import SyntheticSet
from server_app.synthesis.plan import ImageJob, initial_noise
from server_app.synthesis.samplers import denoise, to_images

WORK = Path(__file__).resolve().parent.parent / "runs" / "practice"
SEED = 0
SETTINGS = settings_of("domain-vector", SEED)
SCALES = (0.0, 1.0, 5.0)
EACH = 30
BATCH = 60
CPU = torch.device("cpu")
Record = dict[str, float]


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """H of each row's softmax, in nats [B]."""
    log_p = F.log_softmax(logits, dim=1)
    return -(log_p.exp() * log_p).sum(dim=1)


def unsure(
    kit: Kit,
    jobs: Sequence[ImageJob],
    c: torch.Tensor,
    model: torch.nn.Module,
    guidance: float,
    scale: float,
    steps: int,
) -> torch.Tensor:
    """Images where a model is unsure, uint8 [B, 3, H, W].

    Args:
        c: the condition of every image, [B, L, d].
        guidance: classifier-free, of the condition.
        scale: s, of the entropy's gradient.
    """
    c0 = kit.text([""])

    def loss_at(z: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a_t = kit.alphas_cumprod[t]
        with torch.no_grad():
            e = compose(kit, z, t, c0, [Condition(c, guidance)])
            x0 = x0hat(z, e, a_t)
        # Its value, with the gradient that FedLMG's x0 has
        x0 = x0 + a_t.sqrt() * (z - z.detach())
        x = kit.decode(x0).clamp(-1, 1)
        # `guided_prediction` goes down a loss
        return e, -entropy(model(normalise(x, model)))

    z = initial_noise(jobs, kit.latent_shape, kit.device)
    return to_images(kit, denoise(kit, z, steps, guided_prediction(kit, loss_at, scale)))


@cache
def plain() -> tuple[ServerJob, SyntheticSet]:
    """The images that guidance alone gives, and the job that drew them."""
    config = replace(config_of(SETTINGS), runs_dir=str(WORK))
    job = job_in(config, "plain")
    return job, drawn_by(job, vectors())


def vectors() -> dict[str, DomainVector]:
    """The clients' payloads."""
    return cast(dict[str, DomainVector], sent(SETTINGS))


def second_half(job: ServerJob, model: torch.nn.Module, scale: float) -> SyntheticSet:
    """The fifteen last images of every client and class, drawn where `model` is unsure."""
    taken = vectors()
    kit = load_engine(job.kit, job.device, job.config.synthesis)
    prompts = kit.text(job.config.prompts(job.classes))
    jobs = [image for image in plan_held_classes(job, taken) if image.index >= EACH // 2]
    model = deepcopy(model).to(job.device).requires_grad_(False)
    drawn = []
    for first in range(0, len(jobs), BATCH):
        part = jobs[first : first + BATCH]
        rows = [prompts[one.label] + taken[one.client].domain.to(job.device) for one in part]
        c = torch.stack(rows)
        guidance = job.config.domain_vector.guidance
        drawn.append(unsure(kit, part, c, model, guidance, scale, job.config.synthesis.steps))
        print(f"scale {scale:g}: {first + len(part)} of {len(jobs)}", flush=True)
    labels = torch.tensor([image.label for image in jobs])
    return SyntheticSet(torch.cat(drawn), labels, tuple(image.client for image in jobs))


def measured(scale: float) -> Record:
    """Accuracy (%), and what the first half's model makes of the second half."""
    file = WORK / f"{folder_name(SETTINGS)}-{scale:g}.json"
    if not file.is_file():
        job, images = plain()
        first = first_images(images, EACH, EACH // 2)
        learner = learned()
        second = last_images(images) if scale == 0 else second_half(job, learner, scale)
        logits = logits_of(learner, second.pixels, CPU)
        pixels = torch.cat([first.pixels, second.pixels])
        labels = torch.cat([first.labels, second.labels])
        right = (logits.argmax(dim=1) == second.labels).float().mean().item()
        found = {
            "entropy": entropy(logits).mean().item(),
            "as the model says": 100 * right,
            "accuracy": tested(taught(job.config, pixels, labels)),
        }
        write_atomically(file, json.dumps(found).encode())
        print(scale, found, flush=True)
    record: Record = json.loads(file.read_text())
    return record


@cache
def learned() -> torch.nn.Module:
    """A model of the first half."""
    job, images = plain()
    first = first_images(images, EACH, EACH // 2)
    return taught(replace(job.config, seed=SEED + 1), first.pixels, first.labels)


def last_images(images: SyntheticSet) -> SyntheticSet:
    """The fifteen last of every client's and class's thirty."""
    kept = torch.arange(len(images.labels)) % EACH >= EACH // 2
    return images.select(kept.nonzero().flatten().tolist())


def main() -> None:
    """Make the table, and keep it."""
    parser = command_line(__doc__)
    parser.add_argument(
        "scales", nargs="*", type=float, help="of the entropy's gradient; none: all"
    )
    given = parser.parse_args()
    scales = some_of(given.scales, SCALES, parser)
    make_private_folder(WORK)
    about = (
        "domain-vector, seed 0: the second half of every class's thirty images drawn where a model "
        "of the first is unsure. Scale: of the entropy's gradient; 0: by guidance alone. Entropy "
        "(nats) and share (%) of the second half that the first half's model takes for their "
        "class; top-1 accuracy (%) on the validation split of a model of all. "
        "Command: `python -m benchmarks.practice`."
    )
    names = [f"{scale:g}" for scale in SCALES]
    lines = []
    for scale in scales:
        record = measured(scale)
        cells = {name: f"{value:.2f}" for name, value in record.items()}
        lines.append({"": f"{scale:g}", **cells, "accuracy": f"{record['accuracy']:.1f}"})
        table = with_others(lines, TABLES / "practice.json", about, names)
        write_table(TABLES / "practice", table, about)


if __name__ == "__main__":
    main()
