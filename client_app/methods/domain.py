"""Client half of prompts-domain: the name of this client's domain, and nothing else.

A reference, not a method of the papers: it reveals what OSFL withholds from the server. Espresso
(CVPR 2026) calls it its prompts-only baseline.

Differences: none; the papers say only that the prompt names the domain.
"""

from client_app.context import ClientJob
from osfl.data.partition import DataError
from osfl.payload.kinds import Domain


def make_payload(job: ClientJob) -> Domain:
    """Return the domain's name: the node's `domain`, or in a simulation the data set's.

    Raises:
        DataError: the domain's name is not known.
    """
    domain = job.domain()
    if not domain:
        raise DataError(
            "prompts-domain requires node-config domain: set it to the name of this client's kind "
            "of images, such as 'sketch'"
        )
    images = job.load(job.config.data.image_size)
    return Domain(tuple(job.classes[label] for label in images.held()), domain)
