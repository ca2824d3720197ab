"""Two random fault schedules; `make histories` runs as many as one likes."""

from pathlib import Path

import pytest

from tests.helpers.fault_injection import Testbed, run_fault_free, run_schedule
from tests.helpers.system_tools import Federation

pytestmark = pytest.mark.system
# In the first a site's network is cut. In the second the server's disk is full where this user may
# mount one, and a site's network is slow. After each, a client leaves
SEEDS = (125, 150)


@pytest.mark.timeout(1500)
def test_faults_change_no_result(federation: Federation, tiny_kit: Path) -> None:
    """Images and tests equal those of a fault-free run, and every upload is stored.

    A client that leaves afterwards leaves nothing behind.
    """
    testbed = Testbed(federation, tiny_kit)
    try:
        testbed.begin()
        fault_free = run_fault_free(testbed)
        for seed in SEEDS:
            assert run_schedule(testbed, seed, fault_free, kinds=["leave"]) == [], seed
    finally:
        testbed.unmount()
