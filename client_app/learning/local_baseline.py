"""Local-only baseline: what a client's own training images alone give, for its gain.

A client trains by the global model's recipe on its own training images, and tests that model on its
own test images. It sends a confusion matrix and four counts (`osfl.payload.messages`), never the
model. Its own disk keeps the predictions, so that a server that restarts costs no second training.
"""

import logging
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from filelock import FileLock
from flwr.app import RecordDict
from torch import nn

from client_app.image_cache import files_key
from client_app.paths import check_settings
from osfl.config import ClassifierConfig, ConfigError, NodeConfig, RunConfig
from osfl.data.load import Images, load_images
from osfl.data.parts import class_names
from osfl.kit.kits import find_kit, initial_weights_file
from osfl.kit.used_parts import locally_trained_model
from osfl.methods import METHODS
from osfl.models import classifiers
from osfl.models.training import fit, local_recipe
from osfl.payload.messages import LocalTest, SentModel, pack_local_test, pack_withheld, unpack_model
from osfl.util.costs import Stopwatch
from osfl.util.devices import pick_device
from osfl.util.files import (
    OWNER_ONLY,
    CorruptFileError,
    ensure_own_folder,
    read_record,
    write_record,
)
from osfl.util.seeds import seed_of

log = logging.getLogger("flwr")


def evaluate_alone(
    content: RecordDict, config: RunConfig, node: NodeConfig, client: str, jobs: Path
) -> RecordDict:
    """Make the reply to `evaluate` with a local-only baseline, which is withheld unless exact.

    The figures are a function of the training images without noise, and with a crafted global
    model they say whether the local one is right about a single test image. So nothing is trained
    with an epsilon, nor where `test-results` is not `exact`.

    Args:
        jobs: this site's cache, with a folder for each job.

    Raises:
        ConfigError: the run has no `local-baseline`, or its initial weights are not allowed here.
        ClassifierError: too few images, missing initial weights, or a training that diverged.
    """
    watch = Stopwatch()
    if not config.local_baseline:
        raise ConfigError("local-baseline = false: the run must set it to true to ask for it")
    guaranteed = bool(config.epsilon or node.requires_guarantee)
    if guaranteed or node.tests_only or not node.sends_exact_results:
        return pack_withheld()
    sent = unpack_model(content)
    folder = jobs / sent.job / f"{client}.local"
    ensure_own_folder(folder.parent)
    ensure_own_folder(folder)
    tests = load_images(config.data, node, "test", config.seed)
    # A server that restarts asks again: the second request waits, then finds the predictions
    with FileLock(folder / "lock", mode=OWNER_ONLY):
        local = _predictions(tests, sent, config, node, client, folder)
    names = class_names(config.data)
    model = classifiers.rebuild_classifier(
        sent.state, sent.architecture, len(names), sent.small_stem
    )
    logits = classifiers.compute_logits(model, tests.pixels, pick_device(node.device))
    test = compare_predictions(tests.labels, local, logits.argmax(dim=1), len(names))
    return pack_local_test(test, watch.seconds)


def compare_predictions(
    labels: torch.Tensor, local: torch.Tensor, shared: torch.Tensor, num_classes: int
) -> LocalTest:
    """Count a local model's confusions, and how often it and the global model are correct.

    Args:
        labels, local, shared: [N], true classes and those that the local and the global model
            predict.
    """
    cells = torch.bincount(labels * num_classes + local, minlength=num_classes**2)
    alone = local == labels
    together = shared == labels
    pairs = (together & alone, together & ~alone, alone & ~together, ~alone & ~together)
    counts = [int(pair.sum()) for pair in pairs]
    return LocalTest(cells.reshape(num_classes, num_classes).tolist(), tuple(counts))


def _predictions(
    tests: Images,
    sent: SentModel,
    config: RunConfig,
    node: NodeConfig,
    client: str,
    folder: Path,
) -> torch.Tensor:
    """Return the local model's predictions on the test images, [N]; train it unless cached."""
    key, recipe = _recipe(config, sent)
    splits = ("train", "test")
    size = config.data.image_size
    images = [files_key(config.data, node, split, size) for split in splits]
    inputs = [repr(recipe), config.seed, node.min_class_images, *images]
    record = folder / "predictions.json"
    # A corrupt record costs a second training
    with suppress(CorruptFileError):
        stored = read_record(record)
        if stored.get("inputs") == inputs and len(stored["labels"]) == len(tests):
            return torch.tensor(stored["labels"])
    names_kit = recipe.init == "kit" and not node.kit
    check_settings({key, "kit"} if names_kit else {key}, config, node)
    classes = len(class_names(config.data))
    kit = _kit(recipe, config, node)
    model = classifiers.new_classifier(recipe, classes, kit, config.seed, key)
    _train_alone(model, recipe, config, node, client)
    logits = classifiers.compute_logits(model, tests.pixels, pick_device(node.device))
    labels = logits.argmax(dim=1)
    # On a full disk a server that restarts costs a second training
    with suppress(OSError):
        write_record(record, {"inputs": inputs, "labels": labels.tolist()})
    return labels


def _train_alone(
    model: nn.Module, recipe: ClassifierConfig, config: RunConfig, node: NodeConfig, client: str
) -> None:
    """Train a model in place on the client's own images, in an order of its own."""
    images = load_images(config.data, node, "train", config.seed)
    log.info("%s: training alone on %d images, for local-baseline", client, len(images))
    seed = seed_of(config.seed, "local-baseline", client)
    fit(model, images.pixels, images.labels, recipe, seed, pick_device(node.device))


def _recipe(config: RunConfig, sent: SentModel) -> tuple[str, ClassifierConfig]:
    """Return the key of the initial weights, and the global model's recipe.

    A client of an iterative baseline trains alone for as many epochs as in all rounds.
    """
    key, settings = locally_trained_model(config)
    recipe = replace(settings, architecture=sent.architecture, small_stem=sent.small_stem)
    if METHODS[config.method].rounds:
        return key, local_recipe(recipe, config.rounds.count * config.rounds.local_epochs)
    return key, recipe


def _kit(recipe: ClassifierConfig, config: RunConfig, node: NodeConfig) -> str:
    """Return the folder of the kit that has the initial weights; "" if they are no kit's."""
    if recipe.init != "kit":
        return ""
    name = node.kit or config.kit
    return find_kit(name, (initial_weights_file(recipe.architecture, find_kit(name)),))
