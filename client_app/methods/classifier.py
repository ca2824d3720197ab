"""A classifier trained on the client's own images: the client half of FedLMG and of Local.

FedLMG (Yang et al., arXiv 2311.08870), section 3.2: cross-entropy on the local data, nothing else;
no foundation model on the client, nothing to download.

Differences from the paper:

1. Theirs: ResNet-18 from ImageNet weights. Ours: from the kit's initialisation (`classifier.init =
   "kit"`), because the embedded digits have a miniature world of their own; `imagenet` is
   torchvision's, and configs/methods has it.
2. Theirs: 224 px. Ours: `data.image-size`, with a 3x3 stride-2 stem at 32 px
   (`classifier.small-stem`).
3. Theirs: batches of 32. Ours: of 8 for the digits (`classifier.batch-size`): 100 images make 4
   steps an epoch at 32, and the classifiers stay half trained; 32 is in
   configs/methods/fedlmg.toml.
4. Theirs: no guarantee. Ours: with `epsilon` DP-SGD (client_app/privacy/dp_sgd.py), and the
   initialisation's BatchNorm statistics.
5. Order and dropout are seeded by the run's seed alone: clients with equally many images take them
   in the same order of places.

Payload for Stable Diffusion's setting (ResNet-18, 1000 classes): 11.69 M parameters, and 9,620
BatchNorm statistics.
"""

from client_app.context import ClientJob
from client_app.privacy.dp_sgd import fit_private
from osfl.models import classifiers
from osfl.models.training import fit
from osfl.payload.kinds import Classifier


def make_payload(job: ClientJob) -> Classifier:
    """Train the classifier and send it whole: parameters and BatchNorm's running statistics.

    Raises:
        ClassifierError: too few images, no such architecture or initialisation, or the training
            diverged.
    """
    settings = job.config.classifier
    images = job.load(job.config.data.image_size)
    model = classifiers.new_classifier(
        settings, len(job.classes), job.kit, job.config.seed, "classifier.init"
    )
    if job.config.epsilon:
        fit_private(
            model, images.pixels, images.labels, job.config, job.device, job.meter, job.progress
        )
    else:
        fit(
            model,
            images.pixels,
            images.labels,
            settings,
            job.config.seed,
            job.device,
            meter=job.meter,
            progress=job.progress,
        )
    held = tuple(job.classes[label] for label in images.held())
    return Classifier(held, settings.architecture, model.state_dict())
