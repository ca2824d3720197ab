"""A few of the random fault histories; tests/histories.py plays as many as one likes."""

from pathlib import Path

import pytest
from histories import World, play, quiet
from system_tools import Federation

pytestmark = pytest.mark.system
# Among them: the server is killed; so is a site, while the job is begun twice
SEEDS = (2, 1)


@pytest.mark.timeout(1500)
def test_faults_change_nothing(federation: Federation, tiny_kit: Path) -> None:
    """Images and tests are those of a run in peace, and every upload is kept."""
    world = World(federation, tiny_kit)
    world.begin()
    peace = quiet(world)
    for seed in SEEDS:
        assert play(world, seed, peace) == [], seed
