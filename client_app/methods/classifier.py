"""Client half of FedLMG and of Local: a classifier trained on the client's own images.

FedLMG (Yang et al., arXiv 2311.08870), section 3.2: cross-entropy on the local data and nothing
else. The client needs no foundation model and downloads nothing.

Differences from the paper:

1. Theirs: ResNet-18 from ImageNet weights. Ours: from the kit's initial weights (`classifier.init =
   "kit"`), because the embedded digits are a miniature domain of their own; `imagenet` is
   torchvision's, and configs/methods uses it.
2. Theirs: 224 px. Ours: `data.image-size`, with a 3x3 stride-2 stem at 32 px
   (`classifier.small-stem`).
3. Theirs: batches of 32. Ours: of 8 for the digits (`classifier.batch-size`): with 32, 100 images
   make 4 steps per epoch, and the classifiers stay undertrained; configs/methods/fedlmg.toml uses
   32.
4. Theirs: no DP guarantee. Ours: with `epsilon`, DP-SGD (client_app/privacy/dp_sgd.py) with the
   BatchNorm statistics of the initial weights.
5. Image order and dropout are seeded by the run's seed alone: clients with equally many images
   visit them in the same order of indices.

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
        ClassifierError: there are too few images, the architecture or initialization is unknown, or
            the training diverged.
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
    names = tuple(job.classes[label] for label in images.held())
    return Classifier(names, settings.architecture, model.state_dict())
