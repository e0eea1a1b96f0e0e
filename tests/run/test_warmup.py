"""A warm-up ends by what it reached: looks by steps, a limit of steps, and states to go on from."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tidemill.core.config import build
from tidemill.core.errors import ConfigError, RunFailed
from tidemill.core.types import Sample, Task, Version
from tidemill.run import sft_warmup
from tidemill.run.recipe import RunConfig
from tidemill.run.recipe_tables import WarmupSettings
from tidemill.run.sft_warmup import WarmUp, supervised

TASKS = [Task(f"t{i}", f"p{i}", {"answer": str(i)}) for i in range(50)]


def test_supervised_rows_are_a_mean_over_loss_tokens():
    rows = [(np.arange(4), np.array([0, 0, 1, 1])), (np.arange(3), np.array([0, 1, 0]))]
    samples, losses, scale = supervised(rows)
    assert scale == 1 / 3 and losses["supervised"].name == "cross_entropy"
    assert not any(s.mask.any() for s in samples) and all((s.versions == -1).all() for s in samples)
    np.testing.assert_array_equal(samples[0].weights, [0, 0, 1, 1])
    assert {s.loss for s in samples} == {"supervised"}
    with pytest.raises(ValueError, match=r"loss_mask\[0\]"):
        supervised([(np.arange(2), np.array([1, 1]))])
    with pytest.raises(ValueError, match="one flag a token"):
        supervised([(np.arange(2), np.array([1]))])


class Learner:
    """Trainer, publisher and evaluator in one: its accuracy is a hundredth for each step that it did."""

    def __init__(self, steps: int = 0) -> None:
        self.steps, self.looks, self.trained = steps, list[int](), list[bytes]()

    async def forward_backward(self, samples: list[Sample], losses: object) -> None:
        self.trained.append(b"".join(sample.tokens.tobytes() for sample in samples))

    async def apply(self, scale: float) -> None:
        self.steps += 1

    async def publish(self, version: Version) -> Version:
        assert version.step == self.steps
        return version

    async def __call__(self, tasks: Sequence[Task], versions: Sequence[Version]) -> dict[str, float]:
        (version,) = versions
        self.looks.append(version.step)
        return {"accuracy": self.steps / 100}


def warm(learner: Learner, settings: dict[str, Any], told: list[str] | None = None, **more: Any) -> sft_warmup.WarmedUp:
    told, parts = [] if told is None else told, (learner,) * 3
    how = WarmupSettings.model_validate({"batch": 4, **settings})
    made: Any = WarmUp(how, TASKS, None, *parts, 7, told.append, **more)  # type: ignore[arg-type]
    return asyncio.run(made.run())


@pytest.fixture(autouse=True)
def rows_without_a_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    row = lambda task, _: (np.array([0, int(task.data["answer"])]), np.array([False, True]))  # noqa: E731
    monkeypatch.setattr(sft_warmup, "_row", row)


@pytest.mark.parametrize("seconds_a_look_at_the_clock", [0.0, 1e-3, 7.0, 5000.0])
def test_a_slow_machine_changes_nothing_of_what_comes_out(monkeypatch, seconds_a_look_at_the_clock: float):
    clock = iter(range(10**6))
    slow = SimpleNamespace(monotonic=lambda: next(clock) * seconds_a_look_at_the_clock)
    monkeypatch.setattr(sft_warmup, "time", slow)
    learner, told = Learner(), []
    done = warm(learner, {"accuracy": 0.25, "steps": 90}, told)
    assert (done.steps, done.accuracy, learner.looks) == (30, 0.3, [0, 10, 20, 30])
    assert told[-1] == "warm-up: step 30, accuracy 0.30 (ends at 0.25, or 90 steps)"
    assert len(told) == (1 if seconds_a_look_at_the_clock < 1 else 31)  # its progress is shown, by time


def test_a_target_out_of_reach_is_one_sentence():
    learner = Learner()
    with pytest.raises(ExceptionGroup) as raised:
        warm(learner, {"accuracy": 0.5, "steps": 14})
    (failed,) = raised.value.exceptions
    assert isinstance(failed, RunFailed) and learner.looks == [0, 10, 14]
    said = str(failed)
    assert "\n" not in said and "reached accuracy 0.14 on training tasks in 14 steps" in said
    assert "warmup.accuracy = 0.5 was expected" in said and "more warmup.steps" in said and "reward test" not in said


def test_where_nothing_is_solved_at_all_the_reward_is_named(monkeypatch):
    monkeypatch.setattr(Learner, "__call__", lambda *_: asyncio.sleep(0, {"accuracy": 0.0}))
    with pytest.raises(ExceptionGroup) as raised:
        warm(Learner(), {"accuracy": 0.5, "steps": 2})
    assert "reward test" in str(raised.value.exceptions[0])


def test_a_model_that_is_there_already_is_left_as_it_is():
    learner = Learner(steps=0)
    assert warm(learner, {"accuracy": 0.5}).steps == 50
    learner = Learner(steps=60)
    assert warm(learner, {"accuracy": 0.5}, step=60).steps == 60 and not learner.trained


def test_one_that_goes_on_trains_what_is_left_and_no_row_twice(monkeypatch):
    monkeypatch.setattr(sft_warmup, "SAVE_S", 0.0)
    monkeypatch.setattr(sft_warmup, "SAVE_SHARE", 0)
    saved = list[int]()

    async def save(step: int) -> Coroutine[Any, Any, None]:
        saved.append(step)
        return asyncio.sleep(0)

    whole = Learner()
    warm(whole, {"accuracy": 0.4}, save=save)
    assert saved[0] == 1 and len(saved) > 5 and sorted(saved) == saved
    monkeypatch.setattr(sft_warmup, "TELL_S", 0.0)
    rest, told = Learner(steps=saved[3]), list[str]()
    warm(rest, {"accuracy": 0.4}, told, step=saved[3])
    assert f"step {saved[3] + 1}, accuracy not looked at yet" in told[0], "what is not known is not said"
    assert rest.trained == whole.trained[saved[3] :] and len(set(whole.trained)) > 30


def test_a_state_that_cannot_be_written_ends_the_warm_up(monkeypatch):
    monkeypatch.setattr(sft_warmup, "SAVE_S", 0.0)

    async def full() -> None:
        raise OSError("no space left")

    async def save(step: int) -> Coroutine[Any, Any, None]:
        return full()

    with pytest.raises(ExceptionGroup) as raised:
        warm(Learner(), {"accuracy": 0.9}, save=save)
    assert str(raised.value.exceptions[0]) == "no space left"


def test_the_old_limit_leads_to_the_new_one():
    with pytest.raises(ConfigError, match=r"^warmup: seconds = 40 is no key any more.*set warmup\.steps, or leave it out$"):
        build(RunConfig, {"env": "guess", "model": "m", "run_dir": "r", "warmup": {"accuracy": 0.5, "seconds": 40}})
