"""Which groups are trained once more."""

from __future__ import annotations

from pathlib import Path

from ledger.ledger_cases import group, task

from tidemill.core.types import Score
from tidemill.ledger.ledger import SqliteLedger
from tidemill.run.recipe_tables import ReplaySettings
from tidemill.run.task_source import Experience


def test_the_widest_spread_is_trained_again_and_not_too_often(tmp_path: Path):
    with SqliteLedger(tmp_path / "run", durability="process") as ledger:
        rewards = {0: [0, 1], 1: [1, 1], 2: [0.25, 0.5], 3: [0, 1], 4: [0.5, 1], 5: [0, 0]}
        for i, earned in rewards.items():
            ledger.admit(i, task(i))
            made = group(i)
            del made.trajectories[2:]
            for trajectory, reward in zip(made.trajectories, earned, strict=True):
                trajectory.outcome = Score(float(reward))
            ledger.finish(made)
        for step in range(3):
            ledger.begin_step(step, 0, [2 * step, 2 * step + 1])

        def chosen(step: int, count: int, **settings: int) -> list[int]:
            return Experience(ledger, ReplaySettings(share=count / 8, **settings), count).choose(step)

        assert chosen(3, 9) == [3, 0, 4, 2], "the latest of equals, and nothing where all earned the same"
        assert chosen(3, 2) == [3, 0] and chosen(3, 9, within=1) == [4] and chosen(1, 9) == [0] and chosen(0, 9) == []
        ledger.admit(6, task(6))
        ledger.finish(group(6))
        ledger.begin_step(3, 0, [6], [3, 0])
        assert chosen(4, 9, within=3)[-2:] == [4, 2] and 3 not in chosen(4, 9) and chosen(4, 9, times=2)[-4:] == [3, 0, 4, 2]
        (loaded, *_) = Experience(ledger, ReplaySettings(share=0.25, within=2), 2)(3)
        assert loaded.id == 3 and loaded.trajectories[0].reward == 0
        (damaged,) = (tmp_path / "run" / "trajectories").iterdir()
        payloads = damaged.read_bytes()
        damaged.write_bytes(payloads.replace(b"TMTR", b"????", 7))  # groups 0, 1, 2 and an attempt at 3
        again = Experience(ledger, ReplaySettings(share=1.0), 8)
        assert [g.id for g in again(3)] == [4] == [g.id for g in again(3)]
        assert [e.detail["group"] for e in ledger.events("payload_lost")] == [3, 0, 2], "each is told of once"
        damaged.write_bytes(payloads)
        ledger.retain(checkpoint=0, max_bytes=0)
        assert chosen(3, 9) == [3, 0, 4, 2]
