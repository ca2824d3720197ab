"""Measure a client's own training images for `osfl advise`: three shares of correct images.

- zero-shot: classified by a CLIP (arXiv 2103.00020, section 3.1.2).
- head: classified by a logistic regression on frozen features, cross-validated within this client.
- diffusion: the prompt of the image's class has the smallest denoising error of all classes'
  prompts (arXiv 2303.16203, eq. 6).

Nothing else leaves the site. The shares are exact functions of its images, so a site sends none if
it or the run demands a guarantee (`epsilon`), if it requires secure sums, if it only tests, or if
its `test-results` are not exact. Classes below `min-class-images` are left out, as of a payload.
"""

import logging
from collections.abc import Callable

import numpy as np
import torch
from flwr.app import RecordDict
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from client_app.context import ClientJob
from client_app.learning.features import width_and_features
from osfl.advice import Figures
from osfl.config import ConfigError, NodeConfig, RunConfig
from osfl.config.problems import DIGITS_KITS
from osfl.data.load import Images, open_images
from osfl.data.parts import class_names
from osfl.data.pictures import Fit
from osfl.kit.check import check_kit
from osfl.kit.folder import KitError
from osfl.kit.kits import find_clip, find_kit
from osfl.methods import DIFFUSION_PARTS
from osfl.models.classifiers import ClassifierError
from osfl.models.diffusion import load_kit
from osfl.models.diffusion_classifier import denoising_errors, encode_images
from osfl.models.encoders import load_clip
from osfl.payload.messages import pack_figures, pack_withheld
from osfl.util.devices import pick_device
from osfl.util.seeds import generator_of

log = logging.getLogger("flwr")

# Upper bounds on the number of images that are measured
PER_CLASS = 100
DIFFUSION_PER_CLASS = 8
DIFFUSION_IMAGES = 160
FOLDS = 5


def advise(config: RunConfig, node: NodeConfig, client: str) -> RecordDict:
    """Make the reply to `query.advise`: three shares, or that the site withholds them.

    Raises:
        ConfigError: the run does not ask for advice.
        DataError: there are no training images, or one is not readable.
    """
    if not config.advise:
        raise ConfigError("advise = false: the run must set it to true to ask for it")
    guaranteed = bool(config.epsilon or node.requires_guarantee or node.secure_sum)
    tests_only = node.tests_only or client in config.held_out_clients
    if guaranteed or tests_only or not node.sends_exact_results:
        log.info("%s: this site's settings withhold the figures of osfl advise", client)
        return pack_withheld()
    return pack_figures(measure(config, node, client))


def measure(config: RunConfig, node: NodeConfig, client: str) -> Figures:
    """Return the three shares; None for one whose model this node does not have.

    Raises:
        DataError: as `advise`.
    """
    site = SiteMeasurement(config, node, client)
    figures = Figures(
        site.attempt("zero-shot", site.zero_shot),
        site.attempt("head", site.head),
        site.attempt("diffusion", site.diffusion),
    )
    log.info("%s: figures of osfl advise: %s", client, figures)
    return figures


class SiteMeasurement:
    """Measurement of one client's images by the models that its node has."""

    def __init__(self, config: RunConfig, node: NodeConfig, client: str):
        self._config = config
        self._node = node
        self._client = client
        self._device = pick_device(node.device)
        self._names = class_names(config.data)
        self._kit_name = node.kit or config.kit

    def attempt(self, name: str, measure: Callable[[], float | None]) -> float | None:
        """Return a share; None if its model is missing or does not fit."""
        try:
            share = measure()
        except (ClassifierError, ConfigError, FileNotFoundError, KitError) as error:
            log.warning("%s: no figure %s: %s", self._client, name, error)
            return None
        # Fewer digits reveal less about single images
        return None if share is None else round(share, 3)

    def zero_shot(self) -> float | None:
        """Return the share of images that a CLIP classifies correctly; None without a CLIP."""
        folder = find_clip(self._kit_name, self._config.image_encoder)
        if not folder:
            return None
        clip = load_clip(folder, self._device)
        pixels, labels = self._images(clip.fit, PER_CLASS)
        predicted = clip.classify(pixels, self._config.prompts(self._names))
        return _share(predicted == labels)

    def head(self) -> float | None:
        """Return a linear head's cross-validated accuracy; None with fewer than two classes.

        Classes with a single image are left out.
        """
        images = Images(*self._images(self._config.data.image_size, PER_CLASS))
        needs_kit = self._config.classifier.init == "kit"
        kit = find_kit(self._kit_name) if needs_kit else ""
        if needs_kit and not self._fits_kit():
            return None
        job = ClientJob(
            self._config, self._client, self._names, lambda _: images, kit, self._device
        )
        _, batches = width_and_features(job, images)
        features = torch.cat([rows for _, rows in batches])
        return cross_validate(features.numpy(), images.labels.numpy(), self._config.seed)

    def diffusion(self) -> float | None:
        """Return the kit's accuracy as a classifier; None if it is a kit for other images."""
        if not self._fits_kit():
            return None
        folder = find_kit(self._kit_name, DIFFUSION_PARTS)
        check_kit(folder, DIFFUSION_PARTS, image_condition=False)
        kit = load_kit(folder, self._device)
        per_class = max(1, min(DIFFUSION_PER_CLASS, DIFFUSION_IMAGES // len(self._names)))
        pixels, labels = self._images(kit.image_size, per_class)
        prompts = kit.text(self._config.prompts(self._names))
        latents = encode_images(kit, pixels)
        with torch.no_grad():
            errors = denoising_errors(kit, latents, prompts, self._rng("noise"))
        # Diffusion classifier, eq. 6: the prompt of the smallest error
        return _share(errors.argmin(dim=1) == labels)

    def _fits_kit(self) -> bool:
        return self._kit_name not in DIGITS_KITS or self._config.data.name == "digits"

    def _images(self, fit: Fit, per_class: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode at most `per_class` training images of each class, drawn by the run's seed.

        Returns:
            pixels [N, 3, H, W] uint8, and labels [N].
        """
        opened = open_images(self._config.data, self._node, "train", self._config.seed)
        labels = torch.tensor(opened.labels)
        order = torch.randperm(len(labels), generator=self._rng("images"))
        rows = [order[labels[order] == label][:per_class] for label in sorted(set(opened.labels))]
        chosen = torch.cat(rows).sort().values
        pixels = [opened.pixels(fit, row) for row in chosen.tolist()]
        return torch.stack(pixels), labels[chosen]

    def _rng(self, purpose: str) -> torch.Generator:
        return generator_of(self._config.seed, "advise", self._client, purpose)


def cross_validate(features: np.ndarray, labels: np.ndarray, seed: int) -> float | None:
    """Return the share of images that a head trained on the other folds classifies correctly.

    Classes with a single image are left out.

    Args:
        features: [N, D].
        labels: [N].
        seed: of the folds.

    Returns:
        None with fewer than two classes.
    """
    counts = np.bincount(labels)
    is_kept = counts[labels] > 1
    features = features[is_kept]
    labels = labels[is_kept]
    if len(set(labels)) < 2:
        return None
    folds = min(FOLDS, int(counts[counts > 1].min()))
    head = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    splitter = StratifiedKFold(folds, shuffle=True, random_state=seed)
    return float((cross_val_predict(head, features, labels, cv=splitter) == labels).mean())


def _share(correct: torch.Tensor) -> float:
    return correct.double().mean().item()
