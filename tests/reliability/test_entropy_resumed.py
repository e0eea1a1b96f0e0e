"""A weight that follows what is measured is part of a run's state: a run that goes on has the same, to the last bit."""

from __future__ import annotations

import pytest
from runs import Run

from tidemill.ledger.ledger import SqliteLedger

MORE = ("algorithm.entropy.target=3", "algorithm.entropy.change=0.02")  # never reached: the weight goes up at each step


def weights(run: Run) -> list[float]:
    with SqliteLedger(run.folder, mode="read") as ledger:
        return [step.metrics["entropy_weight"] for step in ledger.steps()]


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_killed_run_goes_on_with_the_weight_that_it_had(deterministic, tmp_path):
    runs = [Run(tmp_path / name, deterministic=deterministic) for name in ("whole", "killed")]
    assert runs[0].train("", *MORE).status == 0
    assert runs[1].train("controller:train:5:kill", *MORE).status != 0
    assert runs[1].train("", *MORE).status == 0
    for run in runs:
        run.check()
        assert weights(run) == pytest.approx([0.02 * step for step in range(run.steps)])
    assert weights(runs[0]) == weights(runs[1])
    assert not deterministic or runs[0].weights() == runs[1].weights()
