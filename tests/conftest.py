"""Shared fixtures. Tests use one thread of torch, so that they run beside each other and give the same numbers.

So do the processes that they start: threads that wait for each other on cores that other tests use burn ten times the work.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before it is read: no test asks the hub, but those that bring one along
os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}  # before torch is: it reads them once

import hypothesis
import pytest
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("any machine", deadline=None)  # examples take the time that a busy machine takes
hypothesis.settings.load_profile("any machine")


LONG = {"test_mutated_runs.py"}  # files whose tests take minutes together: one process has them all, so they come first


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONG)
    if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip("no CUDA device is visible here"))
