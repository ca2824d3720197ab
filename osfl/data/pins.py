"""Check that a run uses the columns, splits and classes that a site has pinned.

The run-config names the label column and the test split. A site that demands a guarantee must not
leave this choice to the server: a column of patients would turn the payload's list of classes into
a list of patients, and another split would turn training images into test images, whose results
have no guarantee.
"""

from osfl.config import ConfigError, DataConfig, NodeConfig, split_names

# Defaults of the run-config, which a site that demands a guarantee accepts without pinning them
DEFAULTS: dict[str, str | float] = {
    "image_column": "image",
    "label_column": "label",
    "domain_column": "domain",
    "group_column": "",
    "train_split": "train",
    "test_split": "",
    "test_share": 0.2,
}


def check_pins(config: DataConfig, node: NodeConfig) -> None:
    """Check that a run uses a site's data set as its node-config demands, without reading data.

    Raises:
        ConfigError: the run uses another column, split, share or list of classes, or a partition
            that makes a training image of one run a test image of another.
    """
    if node.classes and split_names(config.classes) != split_names(node.classes):
        raise ConfigError(
            "data.classes: must equal the list of classes in this site's node-config, in order"
        )
    for field, default in DEFAULTS.items():
        _check_pin(field, getattr(config, field), getattr(node, field), default, node)
    if node.requires_guarantee and config.max_per_class:
        raise ConfigError(
            f"data.max-per-class = {config.max_per_class}: this site demands a guarantee, and one "
            "image would decide which others are left out; set data.max-per-class to 0"
        )
    for key, value in (("split-by", config.split_by), ("domains", config.domains)):
        if node.requires_guarantee and value:
            raise ConfigError(
                f"data.{key} = {value!r}: this site demands a guarantee, but one image would "
                f'decide which others are for training; set data.{key} to ""'
            )
    has_fixed_split = node.data_dir or node.test_split or config.partition == "domain"
    if node.requires_guarantee and config.name.startswith("hf:") and not has_fixed_split:
        raise ConfigError(
            f"data.partition = {config.partition!r}: this site demands a guarantee, and runs with "
            "other seeds would test on its training images; set test-split or data-dir in its "
            "node-config, or data.partition to domain"
        )


def _check_pin(
    field: str, value: str | float, pinned: str | float, default: str | float, node: NodeConfig
) -> None:
    key = field.replace("_", "-")
    if pinned and value != pinned:
        raise ConfigError(f"data.{key} = {value!r}: must equal {key} in this site's node-config")
    if not pinned and node.requires_guarantee and value != default:
        raise ConfigError(
            f"data.{key} = {value!r}: this site demands a guarantee and does not pin this key; set "
            f"{key} in its node-config, or data.{key} to {default!r}"
        )
