"""A named data set whose pixels say which image they are."""

from dataclasses import replace
from pathlib import Path

from datasets import ClassLabel, Dataset, Features, Value
from datasets import Image as ImageColumn
from PIL import Image

from osfl.config import DataConfig, NodeConfig, parse_run_config
from tests.helpers.settings import defaults

CLASSES = ["alarm clock", "Dog", "mouse"]
DOMAINS = ["Clipart", "Real World"]
EACH = 10  # images of each class and domain


def shade(domain: int, label: int, number: int) -> Image.Image:
    """A picture that says which one it is: its red is the domain, its green the class."""
    return Image.new("RGB", (12, 8), (domain * 100, label * 50, number))


def rows(each: int = EACH) -> Dataset:
    """Class by class and domain by domain, as data sets lie."""
    columns: dict[str, list] = {"image": [], "domain": [], "label": []}
    for domain in range(len(DOMAINS)):
        for label in range(len(CLASSES)):
            for number in range(each):
                columns["image"].append(shade(domain, label, number))
                columns["domain"].append(DOMAINS[domain])
                columns["label"].append(label)
    features = Features(
        image=ImageColumn(), domain=Value("string"), label=ClassLabel(names=CLASSES)
    )
    return Dataset.from_dict(columns, features=features)


def data(root: Path | str = "", **settings: object) -> DataConfig:
    chosen = {
        "name": "hf:owner/toy",
        "classes": "alarm_clock,Dog,mouse",
        "image_size": 8,
        "root": str(root),
        **settings,
    }
    return replace(parse_run_config(defaults()).data, **chosen)


def node(part: int, parts: int = 2) -> NodeConfig:
    return NodeConfig(partition_id=part, num_partitions=parts)
