"""Client half of votes: each image votes for the prompt that the diffusion model finds likeliest.

Ours, after Private Evolution (Lin et al., arXiv 2305.15560), in which private images vote for
generated images over many rounds. Here they vote once, and for words: which of the run's public
candidates (names of domains) describes a class's images best. An image votes for the prompt with
the lowest denoising error: a diffusion classifier (Li et al., arXiv 2303.16203, eq. 6).

With `epsilon` above 0, a noisy argmax draws each winner by permute-and-flip
(client_app/privacy/mechanisms.py). The message is then epsilon-differentially private for one image
replaced: by one of the same class, it changes two counts of one vote; by one of another class, one
count in each of two votes, at epsilon / 2 each. The guarantee does not cover which classes the
client holds.

Differences from Private Evolution:

1. Theirs: votes for images, in the space of an image encoder. Ours: for prompts, by the denoiser,
   so that the kit needs no image encoder.
2. Theirs: Gaussian noise on all counts, which are sent in every round. Ours: only the winner is
   sent, once.

Payload: one byte per class.
"""

from functools import partial

import torch

from client_app.context import ClientJob
from client_app.learning.conditions import posteriors
from client_app.privacy.mechanisms import permute_and_flip
from osfl.models.conditioning import Conditioning
from osfl.models.diffusion import Kit, forward_noise, load_kit
from osfl.payload.kinds import Votes
from osfl.util.prompts import fill_prompt
from osfl.util.seeds import generator_of


def make_payload(job: ClientJob) -> Votes:
    """Return the winner of every class, or of all images together.

    Raises:
        KitError: the kit is missing or corrupt.
    """
    kit = load_kit(job.kit, job.device)
    images = job.load(kit.image_size)
    class_labels = images.held()
    mean, _ = posteriors(kit, images, job)
    votes = candidate_errors(kit, mean, images.labels, job).argmin(dim=1)
    if job.config.votes.granularity == "client":
        winners = [select_winner(votes, job)] * len(class_labels)
    else:
        winners = [select_winner(votes[images.labels == label], job) for label in class_labels]
    names = tuple(job.classes[label] for label in class_labels)
    return Votes(names, torch.tensor(winners, dtype=torch.uint8))


def select_winner(votes: torch.Tensor, job: ClientJob) -> int:
    """Return the candidate with the most votes [n]; with an epsilon, a noisy argmax.

    Without an epsilon, the first candidate wins a tie.
    """
    counts = torch.bincount(votes, minlength=len(job.config.votes.words)).tolist()
    if job.config.epsilon:
        return permute_and_flip(counts, job.config.epsilon)
    return int(counts.index(max(counts)))


@torch.no_grad()
def candidate_errors(
    kit: Kit, latents: torch.Tensor, labels: torch.Tensor, job: ClientJob
) -> torch.Tensor:
    """Return denoising errors [N, m] of images under each candidate's prompt for their class.

    Noise and timesteps are the same for all images and candidates, so that an image's vote depends
    on no other image.

    Args:
        latents: [N, c, h, w].
        labels: [N].
    """
    settings = job.config.votes
    prompts = [candidate_conditions(kit, word, job) for word in settings.words]
    generator = generator_of(job.config.seed, "votes")
    timesteps = len(kit.alphas_cumprod)
    sums = torch.zeros(len(latents), len(prompts))
    parts = torch.arange(len(latents)).split(settings.batch_size)
    total = settings.draws * len(parts) * len(prompts)
    finished = 0
    job.progress(finished, total, "batch")
    for draw in range(settings.draws):
        # Midpoints of equal parts of the schedule
        t = int((draw + 0.5) / settings.draws * timesteps)
        eps = torch.randn(latents.shape[1:], generator=generator).to(kit.device)
        for rows in parts:
            noise = eps.expand(len(rows), *eps.shape)
            t_batch = torch.full((len(rows),), t, device=kit.device)
            z_t = forward_noise(latents[rows], noise, kit.alphas_cumprod[t_batch])
            for candidate, prompt in enumerate(prompts):
                c = prompt[labels[rows]]
                e = job.meter.run(("vote", len(rows)), partial(kit.eps, z_t, t_batch, c))
                # Diffusion classifier, eq. 6: the mean over draws of ||eps - e(z_t, t, c)||^2
                sums[rows, candidate] += (noise - e).square().flatten(1).mean(dim=1).cpu().float()
                finished += 1
                job.progress(finished, total, "batch")
    return sums / settings.draws


def candidate_conditions(kit: Kit, word: str, job: ClientJob) -> Conditioning:
    """Encode the prompts of a candidate for every class of the run, C rows."""
    spell = job.config.data.prompt_name
    fields = [{"domain": word, "class": spell(name)} for name in job.classes]
    return kit.text([fill_prompt(job.config.votes.prompt, values) for values in fields])
