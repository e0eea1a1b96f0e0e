"""Whole runs in one process whose trainer is lost in each of its calls: it alone is built again, and nothing is lost."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import tidemill
from tidemill.controller.evaluation import Evaluator
from tidemill.controller.rollout import EpisodeSetup
from tidemill.core.errors import LedgerError, PeerDied, RunFailed
from tidemill.engine.native.native_engine import NativeEngine
from tidemill.ledger.ledger import SqliteLedger
from tidemill.models.new_model import SIZES, fresh_model
from tidemill.run import roles
from tidemill.trainer.native_trainer import NativeTrainer

pytestmark = pytest.mark.runs

STEPS, EVERY = 6, 3  # EVERY: steps between checkpoints, and between evaluations
RECIPE: dict[str, Any] = {
    "rollout": {"groups": 3, "group_size": 4, "max_tokens": 2},
    "eval": {"every": EVERY, "tasks": 4, "final_tasks": 4},
    "record": {"checkpoint_every": EVERY, "trace": False, "probe_every": 1},
    "placement": {"kind": "inline", "environment": {"workers": 0}, "engines": 2},
    "scoring": {"accept": ["gold", "garbage"], "workers": 1},
    "algorithm": {"name": "grpo", "zero_variance": "keep"},
    "trainer": {"lr": 1e-3},
    "supervise": {"resume": True, "backoff_s": 0.0},
}


def score(completion: str, answer: str) -> float:
    return 0.5 * completion.startswith(answer) + 0.25 * completion.count(answer)


TASKS = [{"prompt": f"{c}{sign}", "answer": c} for c in "abcdefgh" for sign in "=:"]
HELD_OUT = 3  # of these tasks, for each evaluation


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "m"
    fresh_model(folder, alphabet="abcdefgh=:\n", context=32, **SIZES["0.1m"])
    return folder


class Built:
    """What a run builds and samples, and the calls at which its trainer is lost."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, deaths: dict[str, tuple[int, ...]]) -> None:
        self.engines, self.trainers = list[Any](), list[Any]()
        self.sampled = Counter[str]()  # tokens by the key of their request, also of those that were cut off
        self.evaluations = list[tuple[int, bool]]()  # those that began: its step, and whether it ended
        self.losses = sum(map(len, deaths.values()))
        for name, kept in {"build_engine": self.engines, "build_trainer": self.trainers}.items():
            build = getattr(roles, name)
            monkeypatch.setattr(roles, name, lambda *given, build=build, kept=kept: kept.append(build(*given)) or kept[-1])
        record, evaluate = NativeEngine._record, Evaluator.__call__

        def recorded(own: Any, plan: Any, *given: Any) -> None:
            here = own._scheduler._tenure[plan.sample_slots] == plan.tenures  # the others were cut off, and do not count
            self.sampled.update(own._slots.requests[slot].key for slot in plan.sample_slots[here])
            record(own, plan, *given)

        async def evaluated(own: Any, tasks: Any, versions: Any = None) -> Any:
            self.evaluations.append((versions[0].step, False))
            place = len(self.evaluations) - 1
            results = await evaluate(own, tasks, versions)
            self.evaluations[place] = versions[0].step, True
            return results

        monkeypatch.setattr(NativeEngine, "_record", recorded)
        monkeypatch.setattr(Evaluator, "__call__", evaluated)
        for name, numbers in deaths.items():
            call, calls = getattr(NativeTrainer, name), itertools.count(1)

            async def dying(own: Any, *given: Any, call: Any = call, calls: Any = calls, numbers: Any = numbers) -> Any:
                if next(calls) in numbers:
                    raise PeerDied("trainer", "died: killed by SIGKILL")
                return await call(own, *given)

            monkeypatch.setattr(NativeTrainer, name, dying)

    def train(self, model: Path, folder: Path, **more: Any) -> Any:
        return tidemill.train(score, model, run_dir=folder, steps=STEPS, tasks=TASKS, quiet=True, **RECIPE | more)

    @property
    def generated(self) -> int:
        return sum(int(engine._activity.counters["generated_tokens"]) for engine in self.engines)


def check(folder: Path, built: Built) -> None:
    with SqliteLedger(folder, mode="read") as ledger:
        counts = ledger.counts()
        assert counts.conserved and counts.trained == 3 * STEPS and counts.pending == 0
        recorded = {
            f"g{group_id}/{row.sample}": row.sampled
            for group_id in ledger.recorded()
            for row in ledger.load(group_id).trajectories
        }
        assert [each.step for each in ledger.evaluations()] == [0, 3, 6]
        assert {each.n for each in ledger.evaluations()} == {HELD_OUT}
        evaluated = sum(each.metrics["length"] * each.metrics["n"] for each in ledger.evaluations())
        (resumed,) = {event.detail["restarted"] for event in ledger.events("run_resumed")}
        assert resumed == "the trainer"
        assert {step.incarnation for step in ledger.steps()} <= {0, 1, 2}
    assert built.generated == built.sampled.total()
    groups = {key: count for key, count in built.sampled.items() if not key.startswith("eval/")}
    assert groups == recorded, "no token of a group was sampled twice"
    check_evaluations(built, evaluated)
    assert len(built.engines) == 2 and all(isinstance(engine, NativeEngine) for engine in built.engines)
    told = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in told if "train/reward" in line] == [1, 2, 3, 4, 5, 6], "each step is told of, once"


def check_evaluations(built: Built, evaluated: float) -> None:
    """Each ended once. evaluated: the recorded tokens. One that a loss cut off began again, and only that one."""
    assert [step for step, ended in built.evaluations if ended] == [0, 3, 6]
    cut_off = [number for number, (_, ended) in enumerate(built.evaluations) if not ended]
    assert len(cut_off) <= built.losses
    assert all(built.evaluations[number][0] == built.evaluations[number + 1][0] for number in cut_off)
    tokens = Counter[int]()
    for key, count in built.sampled.items():
        if key.startswith("eval/"):
            tokens[int(key.split("/")[1])] += count
    assert sum(count for number, count in tokens.items() if number not in cut_off) == evaluated


DEATHS: dict[str, dict[str, tuple[int, ...]]] = {
    "first publication": {"publish": (1,)},
    "gradient": {"forward_backward": (5,)},
    "update": {"apply": (5,)},
    "publication": {"publish": (6,)},
    "snapshot": {"snapshot": (1,)},
    "checkpoint": {"save": (1,)},
    "last publication": {"publish": (7,)},
    "last checkpoint": {"save": (2,)},
    "training again": {"apply": (3, 5)},
    "loading": {"apply": (5,), "load": (1,)},
}


QUICK = ("publication", "checkpoint", "training again")  # under virtual time all of them are tried, too
places = [place if place in QUICK else pytest.param(place, marks=pytest.mark.slow) for place in DEATHS]


@pytest.mark.parametrize("place", places)
def test_only_the_trainer_is_built_again(place: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = Built(monkeypatch, DEATHS[place])
    ended = built.train(model, tmp_path / "run")
    assert ended.complete and len(built.trainers) == 1 + sum(map(len, DEATHS[place].values()))
    check(tmp_path / "run", built)


@pytest.mark.parametrize("step", [EVERY, STEPS])
@pytest.mark.parametrize("when", ["sampled", "recorded"])
def test_an_evaluation_is_repeated_only_if_it_was_cut_off(when, step, model, tmp_path, monkeypatch) -> None:
    """The trainer is lost in a checkpoint when the step's evaluation is sampled but not judged, or is recorded."""
    built, due = Built(monkeypatch, {"save": (step // EVERY,)}), asyncio.Event()
    judge, save, record, held, saves = (
        EpisodeSetup.judge,
        NativeTrainer.save,
        SqliteLedger.evaluation,
        [],
        itertools.count(1),
    )
    before = [(earlier, True) for earlier in range(0, step, EVERY)]

    async def judged(own: EpisodeSetup, task: Any, attempts: Any) -> None:
        if when == "sampled" and own.params.temperature == 0.0 and built.evaluations == [*before, (step, False)]:
            held.append(task.id)
            if len(held) == HELD_OUT:
                due.set()
            await asyncio.wait_for(asyncio.Event().wait(), 60.0)  # until the evaluation is cut off
        await judge(own, task, attempts)

    async def saved(own: NativeTrainer, folder: str) -> None:
        if next(saves) == step // EVERY:
            await asyncio.wait_for(due.wait(), 60.0)
        await save(own, folder)

    def recorded(own: SqliteLedger, of: int, results: Any) -> None:
        record(own, of, results)
        if of == step:
            due.set()

    monkeypatch.setattr(EpisodeSetup, "judge", judged)
    monkeypatch.setattr(NativeTrainer, "save", saved)
    monkeypatch.setattr(SqliteLedger, "evaluation", recorded)
    assert built.train(model, tmp_path / "run").complete and len(built.trainers) == 2
    cut_off = [(step, False)] if when == "sampled" else []
    assert built.evaluations == [*before, *cut_off, *((later, True) for later in range(step, STEPS + 1, EVERY))]
    check(tmp_path / "run", built)


EXACT = {"deterministic": True, "max_lag": 1}


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    with pytest.MonkeyPatch.context() as patch:
        Built(patch, {}).train(model, folder, **EXACT)
    return (folder / "final" / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("place", ["training again", "update", "publication"])
def test_a_deterministic_run_ends_in_the_same_bits(place, model, tmp_path, monkeypatch, undisturbed) -> None:
    built = Built(monkeypatch, DEATHS[place])
    assert built.train(model, tmp_path / "run", **EXACT).complete
    check(tmp_path / "run", built)
    assert (tmp_path / "run" / "final" / "model.safetensors").read_bytes() == undisturbed
    with SqliteLedger(tmp_path / "run", mode="read") as ledger:
        assert ledger.incarnation() == 0 and max(step.runs for step in ledger.steps()) > 1


def test_a_deterministic_run_whose_trainer_does_not_repeat_itself_ends(model, tmp_path, monkeypatch) -> None:
    built = Built(monkeypatch, {"apply": (6,)})
    apply = NativeTrainer.apply

    async def otherwise(own: NativeTrainer, scale: float) -> Any:
        metrics = await apply(own, scale)
        if own is not built.trainers[0]:
            next(own.decoder.parameters()).data.flatten()[0] += 1e-3
        return metrics

    monkeypatch.setattr(NativeTrainer, "apply", otherwise)
    with pytest.raises(LedgerError, match=r"^policy@v4 .* was trained again, and is not policy@v4 .* deterministic"):
        built.train(model, tmp_path / "run", **EXACT)


def test_a_check_of_samples_that_was_cut_off_is_made_again(model, tmp_path, monkeypatch) -> None:
    built = Built(monkeypatch, {"forward": (1,)})
    assert built.train(model, tmp_path / "run", engine={"speculation": {"method": "ngram"}}).complete
    assert len(built.trainers) == 2
    with SqliteLedger(tmp_path / "run", mode="read") as ledger:
        assert len(ledger.events("sampling_checked")) == 1


@pytest.mark.slow
def test_a_spent_budget_and_a_loss_without_supervision_end_the_run(model, tmp_path, monkeypatch) -> None:
    supervise = {"resume": True, "backoff_s": 0.0, "restarts": 2}
    with pytest.raises(RunFailed, match=r"trainer died: .*; it was started again 2 times"):
        Built(monkeypatch, {"apply": (5, 6, 7)}).train(model, tmp_path / "run", supervise=supervise)
    with pytest.raises(PeerDied, match="killed by SIGKILL"):
        Built(monkeypatch, {"apply": (5,)}).train(model, tmp_path / "other", supervise={})
    again = Built(monkeypatch, {}).train(model, tmp_path / "run", supervise=supervise)
    assert again.complete and again.report["groups"]["lost"] == again.report["groups"]["trained_twice"] == 0


@pytest.mark.slow
def test_steps_that_cannot_be_read_make_all_processes_start_again(model, tmp_path, monkeypatch) -> None:
    """Steps have to be undone then, and engines may not step back."""
    built = Built(monkeypatch, {"apply": (6,)})
    unreadable, asked = SqliteLedger.unreadable, itertools.count()

    def first(own: SqliteLedger, ids: Any) -> dict[int, str]:
        ids = list(ids)
        return dict.fromkeys(ids[:1], "it is damaged") if ids and not next(asked) else unreadable(own, ids)

    monkeypatch.setattr(SqliteLedger, "unreadable", first)
    assert built.train(model, tmp_path / "run").complete
    assert len(built.engines) == 4 and len(built.trainers) == 3
    with SqliteLedger(tmp_path / "run", mode="read") as ledger:
        resumed = [event.detail["restarted"] for event in ledger.events("run_resumed")]
        assert resumed == ["the trainer", "all processes"] and ledger.counts().conserved
