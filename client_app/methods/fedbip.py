"""Client half of FedBiP: learned words for domain and classes, and every image's latent posterior.

FedBiP (Chen et al., arXiv 2410.04810, CVPR 2025). Concept level: in the prompt "a S style of a V"
the vectors of S (one per client) and V (one per class) are learned through the frozen diffusion
model. Instance level: the VAE's posterior of every image.

Differences from the paper:

1. Theirs (text): S and V are embeddings that enter the text encoder. Theirs (code) and ours: they
   replace two of its output vectors, in the prompt "a x style of a x" without padding: eight
   positions, of which six are fixed, whatever the class is called. (Padded to 77, as ours once
   were, the two learned vectors stand among 75 fixed ones.)
2. Theirs (code): S begins at the encoding of the domain's name, V at the class's. Ours: at the
   encoding of "a x style of a CLASS", so that the domain's name is not used; V at the last token of
   the class's name.
3. Theirs: the client chooses which images to send. Ours: all.

Payload for Stable Diffusion 1.5 at 512 px: 768 + 768 per class + 2 x 16,384 per image. A posterior
decodes to a close reconstruction of its image: this method reveals the most of all methods here.
"""

import torch

from client_app.context import ClientJob
from client_app.learning.conditions import load_kit_for_training, posteriors, train_shared_vectors
from osfl.models.concepts import encode_concept_prompt, initial_concepts
from osfl.models.conditioning import Conditioning
from osfl.models.diffusion import Kit
from osfl.payload.kinds import Concepts
from osfl.util.minibatches import minibatches
from osfl.util.seeds import generator_of


def make_payload(job: ClientJob) -> Concepts:
    """Learn S and V, and send them with every image's posterior.

    Raises:
        KitError: the kit is missing or corrupt.
        ValueError: the words diverged.
    """
    kit = load_kit_for_training(job)
    images = job.load(kit.image_size)
    class_labels = images.held()
    names = [job.classes[label] for label in class_labels]
    mean, logvar = posteriors(kit, images, job)
    order = images.labels.argsort(stable=True)
    mean = mean[order]
    logvar = logvar[order]
    labels = images.labels[order]
    domain, vectors = learn_words(
        kit,
        names,
        torch.tensor([class_labels.index(y) for y in labels.tolist()]),
        mean,
        logvar,
        job,
    )
    deviations = (0.5 * logvar).exp()
    return Concepts(
        tuple(names), domain, vectors, labels, mean.float().cpu(), deviations.float().cpu()
    )


def learn_words(
    kit: Kit,
    names: list[str],
    owner: torch.Tensor,
    mean: torch.Tensor,
    logvar: torch.Tensor,
    job: ClientJob,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Minimize the denoising loss over S [d] and V [C, d] together, and return both.

    Args:
        names: of the C classes.
        owner: [N], each image's class among them.
        mean, logvar: posteriors, [N, c, h, w].
    """
    settings = job.config.fedbip
    prompt = encode_concept_prompt(kit.text)
    domain, vectors = initial_concepts(kit.text, list(map(job.config.data.prompt_name, names)))
    domain = domain.clone().requires_grad_()
    vectors = vectors.clone().requires_grad_()
    optimizer = torch.optim.Adam([domain, vectors], lr=settings.lr)
    generator = generator_of(job.config.seed, "fedbip", job.client)
    schedule = minibatches(
        torch.arange(len(owner)), settings.epochs, settings.steps, settings.batch_size, generator
    )

    def condition(rows: torch.Tensor) -> Conditioning:
        return prompt.filled(domain, vectors[owner[rows]])

    learned = [domain, vectors]
    domain, vectors = train_shared_vectors(
        kit, learned, condition, mean, logvar, optimizer, schedule, generator, job
    )
    return domain, vectors
