"""Client half of OSCAR: the mean encoding of a class's captions. No training.

OSCAR (Zaland et al., arXiv 2502.08488), section III: BLIP captions every image, the diffusion
model's text encoder encodes the captions, and the encodings are averaged over the images of a
class.

Differences from the paper:

1. Theirs (text): 512 numbers per class; (code): the hidden states [77, 768], and no projection to
   512 exists. Ours: both. `oscar` sends the mean hidden states [L, d]; `oscar-pooled` sends the
   mean end-of-text state [d], from which the server builds a condition.
2. Theirs: the mean itself. Ours: the mean, or with `epsilon` a noisy mean
   (`client_app.privacy.mechanisms.private_mean`).
3. Theirs: a captioner of the first BLIP generation, of unstated size. Ours: the kit's `captioner/`,
   or any BLIP by `captioner`; greedy decoding, so that the same image gives the same caption.

Payload for Stable Diffusion 1.5: 77 x 768 = 59,136 numbers per class, 5.322 M for 90 classes;
pooled 768 per class.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from client_app.context import ClientJob
from client_app.privacy.mechanisms import private_mean_of_class
from osfl.data.load import Images
from osfl.models.encoders import load_captioner, load_text_encoder
from osfl.payload.kinds import Encodings
from osfl.util.costs import FlopMeter

# Images captioned, and captions encoded, in one batch
BATCH = 16


def make_payload(job: ClientJob) -> Encodings:
    """Caption the images, encode the captions, and average the encodings of each class.

    Raises:
        KitError: the captioner or the text encoder is missing or corrupt.
    """
    captioner = load_captioner(job.config.captioner or job.kit, job.device)
    text = load_text_encoder(job.kit, job.device, torch.float32)
    images = job.load(captioner.fit)
    encode = text.pooled if job.config.method == "oscar-pooled" else text.states
    class_labels = images.held()
    prompts = encode(job.config.prompts(job.classes)).float().cpu()
    captions_by_class: dict[int, list[str]] = {label: [] for label in class_labels}
    for rows in job.batched(_batches_by_class(images), len(images), "captioning image"):
        label = int(images.labels[rows[0]])
        captions_by_class[label] += captioner(images.pixels[rows], job.meter)
    means = []
    for label, captions in captions_by_class.items():
        if job.config.epsilon:
            encoded = torch.cat(list(encode_captions(encode, captions, job.meter)))
            noise = job.sum_noise
            mean = private_mean_of_class(encoded, prompts, label, job.config, sum_noise=noise)
            means.append(mean)
        else:
            means.append(mean_encoding(encode, captions, job.meter))
    return Encodings(tuple(job.classes[label] for label in class_labels), torch.stack(means))


def _batches_by_class(images: Images) -> Iterator[torch.Tensor]:
    """Yield rows of at most `BATCH` images of one class."""
    for label in images.held():
        yield from (images.labels == label).nonzero().flatten().split(BATCH)


def mean_encoding(
    encode: Callable[[Sequence[str]], torch.Tensor], captions: Sequence[str], meter: FlopMeter
) -> torch.Tensor:
    """Average a class's encodings (OSCAR, eq. 7): [L, d] or [d], in float32 on the CPU.

    Works batch by batch, so that memory does not grow with the number of images. Sums in float64,
    so that only the encoder's own rounding depends on the batch size.
    """
    total = torch.zeros(())
    for batch in encode_captions(encode, captions, meter):
        total = total + batch.sum(dim=0)
    return (total / len(captions)).float()


def encode_captions(
    encode: Callable[[Sequence[str]], torch.Tensor], captions: Sequence[str], meter: FlopMeter
) -> Iterator[torch.Tensor]:
    """Encode captions batch by batch: yield [B, L, d] or [B, d] in float64 on the CPU."""
    for first in range(0, len(captions), BATCH):
        batch = captions[first : first + BATCH]
        encoding = meter.run(("encode", len(batch)), partial(encode, batch))
        yield encoding.cpu().double()
