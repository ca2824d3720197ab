"""Local-only baseline (`local`): each client's own classifier, tested on all clients' images.

It is the reference for what a client has without the federation.
"""

from collections.abc import Mapping
from typing import cast

from osfl.models.classifiers import rebuild_classifier
from osfl.payload.kinds import Classifier, Payload
from server_app.context import GlobalModel, ServerJob


def run(job: ServerJob, payloads: Mapping[str, Payload]) -> dict[str, GlobalModel]:
    """Return each client's classifier under the client's name."""
    small_stem = job.config.classifier.small_stem
    models = {}
    for client, payload in cast(Mapping[str, Classifier], payloads).items():
        model = rebuild_classifier(
            payload.state, payload.architecture, len(job.classes), small_stem
        )
        models[client] = GlobalModel(model, payload.architecture, small_stem)
    return models
