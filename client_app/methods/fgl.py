"""Client half of FGL: a caption of every image, as text.

FGL (Zhang et al., arXiv 2306.16064): a captioner describes every private image, and the captions
are the server's prompts.

Differences from the paper:

1. Theirs: BLIP-2. Ours: the kit's BLIP, or any BLIP by `captioner`.
2. Ours: greedy decoding, so that the same image gives the same caption; all captions are sent.

Payload: about 50 bytes per image; anyone who sees the message can read the words.
"""

from client_app.context import ClientJob
from osfl.models.encoders import load_captioner
from osfl.payload.kinds import Captions
from osfl.payload.wire import sanitize_caption


def make_payload(job: ClientJob) -> Captions:
    """Caption every image.

    Raises:
        KitError: the captioner is missing or corrupt.
    """
    captioner = load_captioner(job.config.captioner or job.kit, job.device)
    images = job.load(captioner.fit)
    captions: list[str] = []
    for pixels in job.batched(images.pixels.split(16), len(images), "captioning image"):
        captions += captioner(pixels, job.meter)
    captions = [sanitize_caption(text) for text in captions]
    class_labels = images.held()
    texts: dict[int, list[str]] = {label: [] for label in class_labels}
    for caption, label in zip(captions, images.labels.tolist(), strict=True):
        texts[label].append(caption)
    return Captions(
        tuple(job.classes[label] for label in class_labels), tuple(map(tuple, texts.values()))
    )
