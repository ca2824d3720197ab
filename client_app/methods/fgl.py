"""FGL's client half: a caption of every image, as text.

FGL (Zhang et al., arXiv 2306.16064): a captioner describes every private image, and the captions
are the server's prompts.

Differences from the paper:

1. Theirs: BLIP-2. Ours: the kit's BLIP, or any BLIP by `captioner`.
2. Ours: greedy decoding, so that the same image gives the same caption; all captions are sent.

Payload: some 50 bytes an image; the words are readable by whoever sees the message.
"""

from client_app.context import ClientJob
from osfl.models.encoders import load_captioner
from osfl.payload.kinds import Captions
from osfl.payload.wire import sendable


def make_payload(job: ClientJob) -> Captions:
    """Caption every image.

    Raises:
        KitError: the captioner is missing or damaged.
    """
    captioner = load_captioner(job.config.captioner or job.kit, job.device)
    images = job.load(captioner.fit)
    captions: list[str] = []
    job.progress(0, len(images), "captioning image")
    for pixels in images.pixels.split(16):
        captions += captioner(pixels, job.meter)
        job.progress(len(captions), len(images), "captioning image")
    captions = [sendable(text) for text in captions]
    held = images.held()
    texts: dict[int, list[str]] = {label: [] for label in held}
    for caption, label in zip(captions, images.labels.tolist(), strict=True):
        texts[label].append(caption)
    return Captions(tuple(job.classes[label] for label in held), tuple(map(tuple, texts.values())))
