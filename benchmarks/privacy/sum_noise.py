"""Measure what noise costs that six clients add together, instead of each by itself.

python -m benchmarks.privacy.sum_noise

Clients, images and recipe are those of benchmarks.privacy.accuracy_by_epsilon, with ten images of
each class. The masks of a secure sum cancel exactly, so they are left out here.
"""

from collections.abc import Sequence
from typing import cast

import numpy as np

from benchmarks.federation import CLIENTS, Settings
from benchmarks.harness import Experiment, Line, average
from benchmarks.privacy.accuracy_by_epsilon import (
    JOB,
    MECHANISMS,
    accuracies_of,
    config_of,
    job_of,
    trained,
)
from osfl.methods import METHODS, client_module
from osfl.payload.kinds import Payload
from osfl.payload.summands import from_sums, to_summands
from osfl.payload.wire import encode
from server_app.federation.secure_members import sum_layout

COUNT = 10
EPSILON = 1.0
NAMES = ("OSCAR",)
CLASSES = 10
EXPERIMENT = Experiment(
    __file__,
    NAMES,
    f"Top-1 accuracy (%) on the digits' test images, mean of the six domains; one seed, and one "
    f"draw of the noise. Six clients with {COUNT} images of each class. Each client's noise: every "
    f"mean of a client has ε = {EPSILON:g} by itself. The sum's: the sum of the clients' numbers "
    "has it, if all six deliver. As many images are drawn from the sum as from six payloads. The "
    "recipe is that of benchmarks.privacy.accuracy_by_epsilon.",
)


def summed(mechanism: Settings) -> Settings:
    """Return the settings of a secure sum, from which as many images are drawn as from six."""
    images = 10 * len(CLIENTS)
    return {
        **mechanism,
        "secure-sum": True,
        "num-clients": len(CLIENTS),
        "secure-sum-images": COUNT * CLASSES,
        "synthesis.images-per-class": images,
    }


def sum_payloads(mechanism: Settings, epsilon: float) -> dict[str, bytes]:
    """Return the payload of the clients' sum, encoded."""
    settings = summed(mechanism)
    config = config_of(settings, epsilon)
    layout = sum_layout(config, len(CLIENTS))
    total = np.zeros(layout.size, dtype=np.uint32)
    classes: Sequence[str] = ()
    for number in range(len(CLIENTS)):
        job = job_of(settings, number, COUNT, epsilon)
        classes = job.classes
        payload = cast(Payload, client_module(config.method).make_payload(job))
        images = [COUNT] * len(payload.classes)
        total += layout.quantize(to_summands(payload, classes, images, 0))
        if epsilon:
            total += job.sum_noise.draw(layout, config, len(CLIENTS))
    kind = METHODS[config.method].payload or ""
    sums = layout.dequantize(total)
    payloads = from_sums(kind, sums, classes, len(CLIENTS), layout)
    return {
        client: encode(payload, config.method, JOB, client) for client, payload in payloads.items()
    }


def line_of(name: str) -> Line:
    """Return a row: each accuracy without and with the noise."""
    mechanism = MECHANISMS[name]
    line: Line = {"": name}
    for title, epsilon in (("no noise", 0.0), (f"ε = {EPSILON:g}", EPSILON)):
        accuracies = accuracies_of(mechanism, COUNT, epsilon)
        line[f"each client's, {title}"] = average(accuracies)
        together = trained(summed(mechanism), sum_payloads(mechanism, epsilon))
        line[f"the sum's, {title}"] = average(together)
        print(line, flush=True)
    return line


if __name__ == "__main__":
    EXPERIMENT.main(__doc__, lambda row, _=(): [line_of(row)])
