"""The clients of a run that is estimated or checked before it starts."""

from dataclasses import dataclass, replace

from client_app.app import check_node, client_settings, kind_of_site, part_settings
from osfl.config import NodeConfig, RunConfig, kinds_of, parts_of, split_names
from osfl.config.kinds import JOINT
from osfl.data.load import domain_name, image_labels
from osfl.data.parts import class_names


@dataclass(frozen=True)
class Client:
    """A client, described by its settings and its labels.

    Attributes:
        config: with the client's own classifier; in a mixed run that of the payload which makes
            images.
        labels: of the training images, one per image.
        domain: name of the domain; "" if it is unknown here.
        additions: in a mixed run, the settings of the payload in the same message.
    """

    config: RunConfig
    labels: tuple[int, ...]
    domain: str = ""
    additions: tuple[RunConfig, ...] = ()

    @property
    def kind(self) -> str:
        """The kind of payload that the client sends."""
        return JOINT.join(part.method for part in (self.config, *self.additions))

    @property
    def held(self) -> list[int]:
        """The client's distinct labels, ascending."""
        return sorted(set(self.labels))


def simulated_clients(config: RunConfig) -> dict[str, Client]:
    """Check the clients of a simulation, and return them by id.

    Raises:
        ConfigError, DataError, FileNotFoundError, KitError: a client cannot take part.
    """
    clients: dict[str, Client] = {}
    for number in range(config.num_clients):
        # They run as this user, and may read whatever the user may read
        node = NodeConfig(number, config.num_clients, allowed_dirs="/")
        own_config, _, name = client_settings(config, node)
        first, *additions = part_settings(own_config, node, kind_of_site(own_config, node, name))
        for part in (first, *additions):
            check_node(part, node)
        labels = tuple(image_labels(config.data, node, "train", config.seed))
        domain = domain_name(config.data, node, config.seed)
        clients[name] = Client(first, labels, domain, tuple(additions))
    return clients


def placeholder_clients(config: RunConfig) -> dict[str, Client]:
    """Return placeholders for remote clients, each with one image of every class."""
    labels = tuple(range(len(class_names(config.data))))
    architectures = split_names(config.classifier.architecture)
    # Remote clients may choose any kind; the run prefers the first
    first, *additions = parts_of(config, kinds_of(config)[0]).values()
    clients: dict[str, Client] = {}
    for number in range(config.num_clients):
        architecture = architectures[number % len(architectures)]
        classifier = replace(config.classifier, architecture=architecture)
        own_config = replace(first, classifier=classifier)
        clients[f"client-{number}"] = Client(own_config, labels, additions=tuple(additions))
    return clients
