"""OSCAR's client half: the mean encoding of a class's captions. No training.

OSCAR (Zaland et al., arXiv 2502.08488), section III: BLIP captions every image, the diffusion model's text encoder encodes the
captions, and the encodings are averaged over the images of a class.

Differences from the paper:

1. Theirs (text): 512 numbers a class; (code): the hidden states [77, 768], and no projection to 512 exists. Ours: both. `oscar` sends the mean
   hidden states [L, d]; `oscar-pooled` sends the mean end-of-text state [d], from which the server builds a condition.
2. Theirs: a captioner of BLIP's first kind, whose size is not said. Ours: the kit's `captioner/`, or any BLIP by `captioner`; greedy decoding, so that the same image
   gives the same caption.

Payload for Stable Diffusion 1.5: 77 x 768 = 59,136 numbers a class, 5.322 M for 90 classes; pooled 768 a class.
"""

import torch

from client_app.job import ClientJob
from osfl.encoders import load_captioner, load_text_encoder
from osfl.payloads import Encodings


def make_payload(job: ClientJob) -> Encodings:
    """Caption, encode, average.

    Raises:
        KitError: the captioner or the text encoder is missing or damaged.
    """
    captioner = load_captioner(job.config.captioner or job.kit, job.device)
    text = load_text_encoder(job.kit, job.device, torch.float32)
    images = job.load(captioner.image_size)
    encode = text.pooled if job.config.method == "oscar-pooled" else text
    held, means, total = images.held(), [], len(images)
    for label in held:
        captions = captioner(images.pixels[images.labels == label], job.meter)
        encodings = job.meter.run(
            ("encode", len(captions)), lambda captions=captions: encode(captions)
        )  # type: ignore[misc]
        means.append(encodings.float().mean(dim=0).cpu())  # OSCAR, eq. 7
        job.progress(int((images.labels <= label).sum()), total)
    return Encodings(tuple(job.classes[label] for label in held), torch.stack(means))
