"""Which columns, splits and classes of its data set a site lets a run use.

The run-config names the label column and what is a test image. Where a site demands a guarantee,
that choice must not be the server's: a column of patients would make the payload's list of classes
a list of patients, and another split would make training images test images, whose results have no
guarantee.
"""

from osfl.config import ConfigError, DataConfig, NodeConfig, split_names

# The run-config's defaults: what a site that demands a guarantee accepts where it pins nothing
USUAL: dict[str, str | float] = {
    "image_column": "image",
    "label_column": "label",
    "domain_column": "domain",
    "group_column": "",
    "train_split": "train",
    "test_split": "",
    "test_share": 0.2,
}


def check_pins(config: DataConfig, node: NodeConfig) -> None:
    """Check that a run uses a site's data set as its node-config says. No data is read.

    Raises:
        ConfigError: another column, split, share or list of classes, or a cut into clients by
            which a training image of one run is a test image of another.
    """
    if node.classes and split_names(config.classes) != split_names(node.classes):
        raise ConfigError(
            "data.classes: must be the classes, in their order, that this site's node-config "
            "classes names"
        )
    for field, usual in USUAL.items():
        _check_pin(field, getattr(config, field), getattr(node, field), usual, node)
    if node.requires_guarantee and config.max_per_class:
        raise ConfigError(
            f"data.max-per-class = {config.max_per_class}: this site demands a guarantee, and one "
            "image would decide which others are left out; set data.max-per-class to 0"
        )
    own_cut = node.data_dir or node.test_split or config.partition == "domain"
    if node.requires_guarantee and config.name.startswith("hf:") and not own_cut:
        raise ConfigError(
            f"data.partition = {config.partition!r}: this site demands a guarantee, and runs with "
            "other seeds would test on its training images; set test-split or data-dir in its "
            "node-config, or data.partition to domain"
        )


def _check_pin(
    field: str, value: str | float, pinned: str | float, usual: str | float, node: NodeConfig
) -> None:
    key = field.replace("_", "-")
    if pinned and value != pinned:
        raise ConfigError(
            f"data.{key} = {value!r}: must be what this site's node-config {key} names"
        )
    if not pinned and node.requires_guarantee and value != usual:
        raise ConfigError(
            f"data.{key} = {value!r}: this site demands a guarantee and does not name it; set "
            f"{key} in its node-config, or data.{key} to {usual!r}"
        )
