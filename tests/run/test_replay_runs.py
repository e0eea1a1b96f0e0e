"""Groups that are trained once more: which they are, and that whoever goes on with a run trains the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from letter_pairs import letter_model, train

import tidemill
from tidemill.controller.controller import Controller
from tidemill.core.config import load
from tidemill.core.errors import ConfigError
from tidemill.ledger.ledger import SqliteLedger
from tidemill.run.recipe import RunConfig

pytestmark = pytest.mark.runs


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return letter_model(tmp_path_factory.mktemp("model") / "m")


def run(model: Path, folder: Path, steps: int, **more: Any) -> tidemill.run.api.Run:
    settings: dict[str, Any] = {
        "data": {"replay": {"share": 0.5, "within": 4}},
        "rollout": {"groups": 4, "group_size": 4, "max_tokens": 3},
        "eval": {"every": 0, "tasks": 4, "final_tasks": 4},
        "record": {"checkpoint_every": 3, "trace": False, "probe_every": 0},
    }
    return train(model, folder, steps, settings | more)


def composition(folder: Path) -> list[tuple[list[int], list[int]]]:
    with SqliteLedger(folder, mode="read") as ledger:
        return [(ledger.groups_of(s.step), ledger.trained_again(s.step)) for s in ledger.steps()]


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert run(model, folder, 8, deterministic=True).complete
    return folder


def test_a_run_trains_what_it_says_and_conserves(whole: Path):
    steps = composition(whole)
    assert len(steps) == 8 and steps[0][1] == [] and all(len(again) <= 2 for _, again in steps)
    assert sum(bool(again) for _, again in steps) >= 6
    seen = [group_id for _, again in steps for group_id in again]
    assert len(seen) == len(set(seen)), "once each"
    trained_at = {group_id: step for step, (ids, _) in enumerate(steps) for group_id in ids}
    assert all(1 <= step - trained_at[g] <= 4 for step, (_, again) in enumerate(steps) for g in again)
    with SqliteLedger(whole, mode="read") as ledger:
        assert ledger.counts().conserved and ledger.counts().trained == 32
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    told = {int(line["step"]): line for line in lines if "lag/max" in line}
    assert [int(told[s + 1].get("train/replayed", 0)) for s in range(8)] == [len(again) for _, again in steps]
    assert max(line["lag/max"] for line in told.values()) <= 1 and told[8]["train/groups"] == 4 + len(steps[7][1])


@pytest.mark.parametrize("stopped", [4, 6])
def test_an_interrupted_run_ends_in_the_same_weights(model, whole: Path, tmp_path: Path, stopped: int, monkeypatch):
    train = Controller._before_update

    async def falls(self, publishing, step, *rest):
        if step == stopped:
            raise RuntimeError("the power is gone")
        await train(self, publishing, step, *rest)

    monkeypatch.setattr(Controller, "_before_update", falls)
    with pytest.raises(RuntimeError, match="the power is gone"):
        run(model, tmp_path / "run", 8, deterministic=True)
    monkeypatch.undo()
    before = composition(tmp_path / "run")
    assert len(before) == stopped + 1
    assert run(model, tmp_path / "run", 8, deterministic=True).complete
    assert composition(tmp_path / "run") == composition(whole)
    ours, theirs = ((folder / "final/model.safetensors").read_bytes() for folder in (tmp_path / "run", whole))
    assert ours == theirs


def test_steps_are_trained_again_with_what_they_trained_again(model, tmp_path: Path, monkeypatch):
    end = Controller._reported

    async def falls(self):
        if self.step == 5:
            raise RuntimeError("the power is gone")
        await end(self)

    monkeypatch.setattr(Controller, "_reported", falls)
    with pytest.raises(RuntimeError, match="the power is gone"):
        run(model, tmp_path / "run", 8)
    monkeypatch.undo()
    before = composition(tmp_path / "run")
    assert any(again for _, again in before[3:])
    assert run(model, tmp_path / "run", 8).complete
    after = composition(tmp_path / "run")
    assert after[: len(before)] == before and len(after) == 8
    with SqliteLedger(tmp_path / "run", mode="read") as ledger:
        assert ledger.counts().conserved and max(s.incarnation for s in ledger.steps()) == 1
        assert [s.incarnation for s in ledger.steps()][3:5] == [1, 1]
        counted = [s.metrics.get("train/replayed", s.metrics.get("replayed", 0)) for s in ledger.steps()]
    assert [int(n) for n in counted] == [len(again) for _, again in after]


@pytest.mark.parametrize(
    ("data", "algorithm", "told"),
    [
        ({"share": 0.1}, "grpo", r"data.replay.share = 0.1 of rollout.groups = 4 is less than one group: .* 0.25 at least"),
        ({"within": 3}, "grpo", "apply to what is replayed: set data.replay.share"),
        ({"share": 0.5}, "sft", "replay go by what a policy earned"),
    ],
)
def test_what_cannot_be_replayed_is_refused(data: dict[str, float], algorithm: str, told: str):
    base = {"run_dir": "runs/x", "model": "new:0.1m", "env": "guess", "algorithm": algorithm}
    with pytest.raises(ConfigError, match=told):
        load(RunConfig, [], [], base | {"rollout": {"groups": 4}, "data": {"replay": data}})


def test_a_recipe_of_an_older_version_is_gone_on_with(model, tmp_path: Path):
    run(model, tmp_path / "run", 2, data={})
    path = tmp_path / "run/config.json"
    written = json.loads(path.read_text())
    del written["data"]["replay"]
    path.write_text(json.dumps(written))
    assert run(model, tmp_path / "run", 3, data={}).complete
    with pytest.raises(ConfigError, match=r"data\.replay\.share was 0\.0 and is 0\.5"):
        run(model, tmp_path / "run", 4)
