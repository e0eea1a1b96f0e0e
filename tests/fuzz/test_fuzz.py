"""Whatever is read from outside is refused or understood. The figures of the large hunt stand in docs/reliability.md."""

from __future__ import annotations

import pytest
from fuzz import targets_files, targets_wire
from fuzz.hunting import Target, hunt

TARGETS = [*targets_files.TARGETS, *targets_wire.TARGETS]
FEW = 60  # inputs a target, the same each time
MANY = 10_000  # inputs a target, new ones each time


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_some_inputs(target: Target) -> None:
    assert hunt(target, FEW).tried >= FEW // 2


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_many_inputs(target: Target, capsys: pytest.CaptureFixture[str]) -> None:
    bag = hunt(target, MANY, fixed=False)
    with capsys.disabled():
        figures = f"{bag.tried:,} inputs, {bag.refused:,} refused, {bag.seconds:.0f} s, memory +{bag.memory_mb:.0f} MB"
        print(f"\n{target.name}: {figures}", flush=True)
