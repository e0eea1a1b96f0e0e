"""Whatever a reward does: never a gradient, never longer than its limit, always counted and shown, nothing left behind."""

from __future__ import annotations

import asyncio
import glob
import json
import os
import time
from pathlib import Path

import psutil
import pytest
from test_pool import FAULTY, good, until_gone

from tidemill.cli.commands import training
from tidemill.core.types import InfraError, Score
from tidemill.envs.reward_workers.reward_pool import RewardPool
from tidemill.ledger.ledger import SqliteLedger
from tidemill.run import session
from tidemill.runtime.workers.child import MARK
from tidemill.trainer.native_trainer import NativeTrainer

pytestmark = pytest.mark.runs

LIMIT_S = 1.0
SLACK_S = 20.0  # of a busy machine, for what has no limit of its own: the start and the end of a process


def marked() -> list[int]:
    """Every process that one of this process's workers was, or started, wherever it has gone."""
    found = []
    for process in psutil.process_iter():
        try:
            environ = Path(f"/proc/{process.pid}/environ").read_bytes()
        except OSError:
            continue
        if MARK.encode() in environ and process.status() != psutil.STATUS_ZOMBIE:
            found.append(process.pid)
    return found


@pytest.fixture
async def pool():
    pool = RewardPool(workers=1, limit_s=LIMIT_S)
    yield pool
    await pool.close()
    assert await until_gone(marked())


FAULTS = {
    "prints_a_gigabyte": "printed more than 64 MiB in one call and was killed",
    "returns_a_gigabyte": "returned 'xxx",
    "returns_a_gigabyte_of_bytes": "returned b'\\x00",
    "raises_a_gigabyte": "raised ValueError: xxx",
    "nan_part": "returned a Score whose format is nan",
    "text_part": "returned a Score whose format is 'good'",
    "complex_score": "raised",
    "recurses": "raised RecursionError",
    "closes_everything": "",
    "stops_itself": "did not return within 15 s",
    "kills_its_group": "was killed by SIGKILL",
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_is_counted_and_the_next_call_is_judged(pool, fault):
    limit = 1.0 if fault == "stops_itself" else 15.0
    begun = time.monotonic()
    outcome = await pool.call(f"{FAULTY}:{fault}", ["text"], name=fault, limit_s=limit)
    assert isinstance(outcome, InfraError)
    assert FAULTS[fault].replace("15 s", "1 s") in outcome.reason, outcome.reason
    assert len(outcome.reason) < 1000 and time.monotonic() - begun < limit + SLACK_S
    await good(pool)
    counters = pool.counters()
    assert (counters["scoring/errors"], counters["scoring/scores"]) == (1, 2)


@pytest.mark.parametrize("fault", ["daemonises", "daemonises_and_dies", "daemonises_and_sleeps"])
async def test_a_grandchild_that_left_its_family_does_not_outlive_the_call(pool, fault, tmp_path):
    pids = tmp_path / "pids"
    outcome = await pool.call(f"{FAULTY}:{fault}", ["x", str(pids)], limit_s=3)
    assert isinstance(outcome, Score if fault == "daemonises" else InfraError)
    started = [int(line) for line in pids.read_text().split()]
    assert len(started) == 1 and os.getpgid(os.getpid()) != started[0]
    assert await until_gone(started)
    await good(pool)


async def test_one_call_does_not_disturb_the_next(pool):
    assert await pool.call(f"{FAULTY}:disturbs", ["x"]) == Score(1.0)
    assert await pool.call(f"{FAULTY}:is_undisturbed", ["x"], limit_s=10) == Score(1.0)
    assert pool.counters()["scoring/starts"] == 1


async def test_a_thread_left_behind_costs_the_next_call_its_limit_and_no_more(pool):
    function = f"{FAULTY}:leaves_a_thread_that_holds_the_interpreter"
    assert await pool.call(function, ["x"]) == Score(1.0)
    time.sleep(0.5)  # until the thread has the interpreter for itself: nobody else runs in this process meanwhile
    begun = time.monotonic()
    outcome = await pool.call(function, ["x"], name="it", limit_s=LIMIT_S)
    assert isinstance(outcome, InfraError) and "within 1 s" in outcome.reason
    assert time.monotonic() - begun < LIMIT_S + SLACK_S
    await good(pool)


def recipe(folder: Path, faults: list[str]) -> Path:
    pids = folder / "pids"
    rows = [{"prompt": f"{i} {fault}", "fault": fault, "pids": f"{pids}.{i}"} for i, fault in enumerate(faults)]
    for name, chosen in (("train", rows), ("eval", [{"prompt": "held out", "fault": "raises", "pids": f"{pids}.eval"}])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))
    path = folder / "recipe.toml"
    path.write_text(
        f"run_dir = '{folder}/run'\nmodel = 'new:0.1m'\nsteps = 1\nmax_lag = 0\nplacement = 'inline'\n"
        f"env = {{ kind = 'rows', data = '{folder}/train.jsonl', eval_data = '{folder}/eval.jsonl', "
        f"reward = '{FAULTY}:now_and_then' }}\n"
        f"rollout = {{ groups = {len(faults)}, group_size = 4, max_tokens = 6 }}\n"
        "eval = { tasks = 1, final_tasks = 1 }\nrecord.trace = false\n"
        f"scoring = {{ workers = 2, limit_s = {LIMIT_S}, max_error_share = 1.0 }}\n"
    )
    return path


def test_a_run_trains_on_nothing_but_scores(tmp_path, monkeypatch, capsys):
    from faulty_rewards import KINDS

    pools, trained = [], []

    class Pool(RewardPool):
        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **kwargs)
            pools.append(self)

    async def forward_backward(self, samples, losses):
        trained.extend((sample.group, sample.attempt) for sample in samples)
        return await real(self, samples, losses)

    real = NativeTrainer.forward_backward
    monkeypatch.setattr(session, "RewardPool", Pool)
    monkeypatch.setattr(NativeTrainer, "forward_backward", forward_backward)
    begun = time.monotonic()
    assert training.by_recipe(recipe(tmp_path, list(KINDS)), [], True) == 0
    took = time.monotonic() - begun

    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    judging, counters = said[-1]["judging"], pools[0].counters()
    with SqliteLedger(tmp_path / "run", mode="read") as ledger:
        groups = [ledger.load(group) for group in range(ledger.next_group_id())]
        counts = ledger.counts()
        in_step = set(ledger.groups_of(0))
    scored = {(g.id, t.sample) for g in groups for t in g.trajectories if isinstance(t.outcome, Score)}
    failed = {(g.id, t.sample) for g in groups for t in g.trajectories if isinstance(t.outcome, InfraError)}
    met = {g.task.data["fault"] for g in groups for t in g.trajectories if isinstance(t.outcome, InfraError)}
    assert met == set(KINDS), "every fault happened"
    assert set(trained) == {(group, sample) for group, sample in scored if group in in_step} and not set(trained) & failed
    assert counts.conserved and counts.trained == len(KINDS)

    assert judging["infra_errors"] == len(failed) and judging["scored"] == len(scored) and judging["pauses"] == 0
    steps = [line for line in said if line["kind"] == "step"]
    assert steps[0]["infra_errors"] == len(failed)
    assert any("has no score" in line.get("text", "") for line in said), "shown as it happens"
    held_out = sum(line["infra_errors"] for line in said if line["kind"] == "eval")
    assert counters["scoring/errors"] == len(failed) + held_out
    late = sum(
        "did not return within" in t.outcome.reason for g in groups for t in g.trajectories if t.outcome in _errors(g)
    )
    assert counters["scoring/timeouts"] == late > 0
    assert took < counters["scoring/timeouts"] * LIMIT_S + counters["scoring/starts"] * SLACK_S

    left = [int(pid) for file in glob.glob(f"{tmp_path}/pids.*") for pid in Path(file).read_text().split()]
    assert len(left) > len(failed) // 2 and asyncio.run(until_gone(left)) and not marked()


def _errors(group) -> list[InfraError]:
    return [t.outcome for t in group.trajectories if isinstance(t.outcome, InfraError)]
