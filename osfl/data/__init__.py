"""Data sets and how they are cut into clients."""

from osfl.data.load import (
    DataError,
    Images,
    check_images,
    class_names,
    count_images,
    domain_name,
    load_images,
    simulated_folder,
)

__all__ = [
    "DataError",
    "Images",
    "check_images",
    "class_names",
    "count_images",
    "domain_name",
    "load_images",
    "simulated_folder",
]
