"""votes: each image votes for the prompt that the diffusion model finds likeliest for it.

Ours, after Private Evolution (Lin et al., arXiv 2305.15560), in which private images vote for
generated ones, over many rounds. Here they vote once, and for words: which of the run's public
candidates, domains by name, a class's images look like. The nearest prompt is that under which the
denoising error is least: a diffusion classifier (Li et al., arXiv 2303.16203, eq. 6).

With `epsilon` above 0 a winner is drawn by permute-and-flip (client_app/privacy/mechanisms.py). The
message is then epsilon-differentially private for one image replaced: of the same class it
changes two counts of one election; of another class, one count in each of two, at epsilon / 2 each.
Which classes the client holds is not covered.

Differences from Private Evolution:

1. Theirs: votes for images, in the space of an image encoder. Ours: for prompts, by the denoiser,
   so that the kit needs no image encoder.
2. Theirs: Gaussian noise on all counts, which are sent, in every round. Ours: the winner alone is
   sent, once.

Payload: a byte a class.
"""

from functools import partial

import torch

from client_app.context import ClientJob
from client_app.learning.conditions import posteriors
from client_app.privacy.mechanisms import permute_and_flip
from osfl.models.diffusion import Kit, forward_noise, load_kit
from osfl.payload.kinds import Votes
from osfl.util.prompts import fill
from osfl.util.seeds import generator_of


def make_payload(job: ClientJob) -> Votes:
    """The winner of every class, or of all images together.

    Raises:
        KitError: the kit is missing or damaged.
    """
    kit = load_kit(job.kit, job.device)
    images = job.load(kit.image_size)
    held = images.held()
    mean, _ = posteriors(kit, images, job)
    votes = errors(kit, mean, images.labels, job).argmin(dim=1)
    if job.config.votes.electorate == "client":
        winners = [elected(votes, job)] * len(held)
    else:
        winners = [elected(votes[images.labels == label], job) for label in held]
    names = tuple(job.classes[label] for label in held)
    return Votes(names, torch.tensor(winners, dtype=torch.uint8))


def elected(votes: torch.Tensor, job: ClientJob) -> int:
    """The candidate with the most votes [n], the first of equals; with an epsilon, one of many."""
    counts = torch.bincount(votes, minlength=len(job.config.votes.words)).tolist()
    if job.config.epsilon:
        return permute_and_flip(counts, job.config.epsilon)
    return int(counts.index(max(counts)))


@torch.no_grad()
def errors(kit: Kit, latents: torch.Tensor, labels: torch.Tensor, job: ClientJob) -> torch.Tensor:
    """The denoising error of every image under every candidate's prompt for its class [N, m].

    Noise and timesteps are the same for all images and candidates, so that an image's vote depends
    on no other image.

    Args:
        latents: [N, c, h, w].
        labels: [N].
    """
    settings = job.config.votes
    prompts = torch.stack([conditions(kit, word, job) for word in settings.words])
    generator = generator_of(job.config.seed, "votes")
    last = len(kit.alphas_cumprod)
    found = torch.zeros(len(latents), len(prompts))
    parts = torch.arange(len(latents)).split(settings.batch_size)
    total = settings.draws * len(parts) * len(prompts)
    done = 0
    job.progress(done, total, "batch")
    for draw in range(settings.draws):
        # The middles of equal parts of the schedule
        t = int((draw + 0.5) / settings.draws * last)
        eps = torch.randn(latents.shape[1:], generator=generator).to(kit.device)
        for rows in parts:
            noise = eps.expand(len(rows), *eps.shape)
            at = torch.full((len(rows),), t, device=kit.device)
            z_t = forward_noise(latents[rows], noise, kit.alphas_cumprod[at])
            for candidate, prompt in enumerate(prompts):
                c = prompt[labels[rows]]
                e = job.meter.run(("vote", len(rows)), partial(kit.eps, z_t, at, c))
                # Diffusion classifier, eq. 6: the mean over draws of ||eps - e(z_t, t, c)||^2
                found[rows, candidate] += (noise - e).square().flatten(1).mean(dim=1).cpu().float()
                done += 1
                job.progress(done, total, "batch")
    return found / settings.draws


def conditions(kit: Kit, word: str, job: ClientJob) -> torch.Tensor:
    """tau(prompt) of a candidate and every class of the run [C, L, d]."""
    spelled = job.config.data.word
    names = [{"domain": word, "class": spelled(name)} for name in job.classes]
    return kit.text([fill(job.config.votes.prompt, each) for each in names])
