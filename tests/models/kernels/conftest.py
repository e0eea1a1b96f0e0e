"""The kernels, for tests that need them."""

from __future__ import annotations

import pytest

from tidemill.models.kernels.cpu.bindings import Native
from tidemill.models.kernels.library import native


@pytest.fixture
def kernels() -> Native:
    found = native()
    if found is None:
        pytest.skip("no C compiler")
    return found
