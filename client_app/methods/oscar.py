"""OSCAR's client half: the mean encoding of a class's captions. No training.

OSCAR (Zaland et al., arXiv 2502.08488), section III: BLIP captions every image, the diffusion
model's text encoder encodes the captions, and the encodings are averaged over the images of a
class.

Differences from the paper:

1. Theirs (text): 512 numbers a class; (code): the hidden states [77, 768], and no projection to 512
   exists. Ours: both. `oscar` sends the mean hidden states [L, d]; `oscar-pooled` sends the mean
   end-of-text state [d], from which the server builds a condition.
2. Theirs: the mean itself. Ours: that, or with `epsilon` a noised mean
   (`client_app.privacy.mechanisms.private_mean`).
3. Theirs: a captioner of BLIP's first kind, whose size is not said. Ours: the kit's `captioner/`,
   or any BLIP by `captioner`; greedy decoding, so that the same image gives the same caption.

Payload for Stable Diffusion 1.5: 77 x 768 = 59,136 numbers a class, 5.322 M for 90 classes; pooled
768 a class.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from client_app.context import ClientJob
from client_app.privacy.mechanisms import private_mean_of_class
from osfl.models.encoders import load_captioner, load_text_encoder
from osfl.payload.kinds import Encodings
from osfl.util.costs import FlopMeter

BATCH = 16  # images that are captioned, and captions that are encoded, together


def make_payload(job: ClientJob) -> Encodings:
    """Caption, encode, average.

    Raises:
        KitError: the captioner or the text encoder is missing or damaged.
    """
    captioner = load_captioner(job.config.captioner or job.kit, job.device)
    text = load_text_encoder(job.kit, job.device, torch.float32)
    images = job.load(captioner.fit)
    encode = text.pooled if job.config.method == "oscar-pooled" else text
    held = images.held()
    prompts = encode(job.config.prompts(job.classes)).float().cpu()
    means = []
    total = len(images)
    done = 0
    job.progress(done, total, "captioning image")
    for label in held:
        captions: list[str] = []
        for rows in (images.labels == label).nonzero().flatten().split(BATCH):
            pixels = images.pixels[rows]
            captions += captioner(pixels, job.meter)
            done += len(pixels)
            job.progress(done, total, "captioning image")
        if job.config.epsilon:
            every = torch.cat(list(encodings(encode, captions, job.meter)))
            means.append(private_mean_of_class(every, prompts, label, job.config))
        else:
            means.append(mean_encoding(encode, captions, job.meter))
    return Encodings(tuple(job.classes[label] for label in held), torch.stack(means))


def mean_encoding(
    encode: Callable[[Sequence[str]], torch.Tensor], captions: Sequence[str], meter: FlopMeter
) -> torch.Tensor:
    """The mean of a class's encodings (OSCAR, eq. 7), [L, d] or [d], in float32 on the CPU.

    Batch by batch, so that memory does not grow with the images; summed in float64, so that the
    mean is that of all at once but for the encoder's own rounding, which differs with the size of a
    batch.
    """
    total = torch.zeros(())
    for batch in encodings(encode, captions, meter):
        total = total + batch.sum(dim=0)
    return (total / len(captions)).float()


def encodings(
    encode: Callable[[Sequence[str]], torch.Tensor], captions: Sequence[str], meter: FlopMeter
) -> Iterator[torch.Tensor]:
    """Of captions, batch by batch: [B, L, d] or [B, d] in float64 on the CPU."""
    for first in range(0, len(captions), BATCH):
        batch = captions[first : first + BATCH]
        found = meter.run(("encode", len(batch)), partial(encode, batch))
        yield found.cpu().double()
