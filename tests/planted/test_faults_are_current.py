"""Every planted fault still finds its line in the package, and its tests are there."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults import Fault
from plant import EVERY, ROOT, source_of


@pytest.mark.parametrize("fault", EVERY, ids=[fault.name for fault in EVERY])
def test_a_fault_has_one_place_and_tests(fault: Fault) -> None:
    source_of(fault, ROOT / "tidemill")
    assert fault.right != fault.wrong
    for path in fault.tests.split():
        assert Path(ROOT, "tests", path.partition("::")[0]).exists(), path
