"""Imports without garbage collection."""

import gc

import pytest

from osfl.util.imports import without_collection


def test_collection_is_afterwards_as_it_was() -> None:
    with without_collection():
        assert not gc.isenabled()
        with without_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ModuleNotFoundError), without_collection():
        import no_such_module  # noqa: F401
    assert gc.isenabled()
