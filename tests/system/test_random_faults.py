"""A few of the random fault histories; `make histories` plays as many as one likes."""

from pathlib import Path

import pytest

from tests.helpers.fault_injection import World, play, quiet, unmount
from tests.helpers.system_tools import Federation

pytestmark = pytest.mark.system
# Of the first: a site's ClientApp crashes if one runs, and its network is cut. Of the second: the
# server's disk is full where this user may mount one, a site's network is slow, and the server's
# ServerApp crashes if one runs
SEEDS = (125, 150)


@pytest.mark.timeout(1500)
def test_faults_change_nothing(federation: Federation, tiny_kit: Path) -> None:
    """Images and tests are those of a run in peace, and every upload is kept."""
    world = World(federation, tiny_kit)
    try:
        world.begin()
        peace = quiet(world)
        for seed in SEEDS:
            assert play(world, seed, peace) == [], seed
    finally:
        unmount(world)
