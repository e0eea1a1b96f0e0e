"""`tidemill reward rejudge RUN`: judges a run's recorded attempts again.

What was trained on stays as it is. Attempts that failed, were cancelled or were given keep their outcome.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from rich.text import Text

from tidemill.cli.commands.judging import in_its_workers, recipe_of, scoring_workers, with_sources, working
from tidemill.cli.commands.samples import judged_text
from tidemill.cli.commands.screen import Row, print_json, show_rows
from tidemill.controller.rollout import EpisodeSetup
from tidemill.core.amounts import amount
from tidemill.core.errors import ConfigError, PayloadLost
from tidemill.core.interfaces import Environment
from tidemill.core.types import Finish, Group, Outcome, SamplingParams, Score, Task, Trajectory
from tidemill.envs.build_environment import make_environment
from tidemill.envs.environment import FunctionEnvironment
from tidemill.envs.environment_mixture import parts_of
from tidemill.envs.reward_list import judge_of
from tidemill.envs.reward_workers.reward_pool import RewardPool
from tidemill.envs.tasks import columns_of
from tidemill.ledger.ledger import SqliteLedger
from tidemill.ledger.row_formats import KINDS, Judged
from tidemill.models.tokenizer import Tokenizer
from tidemill.observability.safe_text import visible
from tidemill.run.hub_names import fetched
from tidemill.run.recipe import RunConfig
from tidemill.run.storage.run_folder import RunFolder

SHOWN = 20  # changed attempts; --json has all
UNJUDGED = frozenset({Finish.ENV_ERROR, Finish.CANCELLED, Finish.GIVEN})  # ends without a reply to judge


@dataclass(slots=True)
class Rejudged:
    """The result: judged attempts, those with another outcome than before, and those left out."""

    judge: str
    attempts: int = 0
    changed: list[dict[str, Any]] = field(default_factory=list)  # those of another kind, or with another reward
    otherwise: int = 0  # scores that differ in their parts or turns only
    without_reply: int = 0
    unreadable: int = 0  # groups whose payload is gone or damaged


def rejudge(run: Path, reward: str | None, overrides: Sequence[str], as_json: bool) -> int:
    """Judge recorded attempts again, and show which outcomes changed. Returns 0."""
    folder = RunFolder.existing(run)
    config = recipe_of(folder, overrides)
    if reward is None:
        if not config.judged or config.offline:
            raise ConfigError(f"{run} has no reward: name the one that is to judge, with --reward FILE.py:FUNCTION")
        config = fetched(with_sources(config, folder).model_copy(update={"model": "new:0.1m"}), run)  # no model is needed
    with (
        working("rejudge", f"{run}: judging its attempts again", as_json, folder.logs),
        SqliteLedger(run, mode="open", durability="process") as ledger,
    ):
        found = asyncio.run(_judge_all(ledger, config, reward))
        ledger.event("rejudged", {"judge": found.judge, "attempts": found.attempts, "changed": len(found.changed)})
    if as_json:
        print_json({"run": str(run), **asdict(found)})
    else:
        _show(run, found)
    return 0


async def _judge_all(ledger: SqliteLedger, config: RunConfig, reward: str | None) -> Rejudged:
    async with scoring_workers(config) as scorer, _environment(ledger, config, reward, scorer) as environment:
        name = reward or environment.name
        # an episode asks for a tokenizer and parameters, a judgement does not
        setup = EpisodeSetup(environment, cast(Tokenizer, None), SamplingParams(), 1 << 40, config.rollout.episode_s)
        result, ids, together = Rejudged(name), ledger.recorded(), max(1, config.scoring.workers)
        for first in range(0, len(ids), together):
            groups = [group for each in ids[first : first + together] if (group := _loaded(ledger, each, result))]
            judged = await asyncio.gather(*(_judge(setup, group, result) for group in groups))
            ledger.judge_again({group.id: each for group, each in zip(groups, judged, strict=True)}, name)
        result.changed.sort(key=lambda each: (each["group_id"], each["place"]))
        return result


@asynccontextmanager
async def _environment(
    ledger: SqliteLedger, config: RunConfig, reward: str | None, scorer: RewardPool
) -> AsyncIterator[Environment]:
    """The run's environment, or one that judges by another reward."""
    if reward is not None:
        judge = judge_of(reward, scorer)
        judge.check(columns_of([ledger.task_of(each) for each in ledger.recorded()]))
        yield cast(Environment, _Judging(reward, judge))
        return
    made = make_environment(config.env, scorer)
    if decides := [each.name for each in parts_of(made) if isinstance(each, FunctionEnvironment)]:
        raise ConfigError(
            f"environment {decides[0]!r} decides on an attempt while it is played, and nothing is played again: name the "
            "reward that is to judge, with --reward FILE.py:FUNCTION"
        )
    async with in_its_workers(config, made, config.env) as environment:
        yield environment


class _Judging:
    """The part of an environment that a judgement needs."""

    def __init__(self, name: str, judge: Any) -> None:
        self.name, self._judge = name, judge

    async def judge(self, task: Task, attempts: list[Trajectory]) -> list[Outcome]:
        return await self._judge(task, attempts)


def _loaded(ledger: SqliteLedger, group_id: int, result: Rejudged) -> Group | None:
    try:
        return ledger.load(group_id)
    except PayloadLost:
        result.unreadable += 1
        return None


async def _judge(setup: EpisodeSetup, group: Group, result: Rejudged) -> Judged:
    """The new outcomes of a group's attempts. An attempt is judged by its last trajectory."""
    last = {t.sample: (place, t) for place, t in enumerate(group.trajectories)}
    able = {key: (place, t) for key, (place, t) in last.items() if t.outcome and t.mask.any() and t.finish not in UNJUDGED}
    result.without_reply += len(last) - len(able)
    rows = {each[0].sample: each for each in group.attempts}
    attempts = [[*rows[sample][:-1], replace(t, outcome=None)] for sample, (_, t) in able.items()]
    await setup.judge(group.task, attempts)
    judged = dict[int, Outcome]()
    for (sample, (place, before)), (*_, now) in zip(able.items(), attempts, strict=True):
        assert before.outcome is not None and now.outcome is not None
        judged[sample] = now.outcome
        was, is_now = _plain(before.outcome), _plain(now.outcome)
        if (was["outcome"], was["reward"]) != (is_now["outcome"], is_now["reward"]):
            where = {"group_id": group.id, "place": place, "sample": sample}
            result.changed.append(where | {"before": was, "after": is_now})
        elif isinstance(now.outcome, Score) and now.outcome != before.outcome:
            result.otherwise += 1
    result.attempts += len(judged)
    return judged


def _plain(outcome: Outcome) -> dict[str, Any]:
    if isinstance(outcome, Score):
        return {"outcome": "score", "reward": outcome.value, "reason": None}
    return {"outcome": KINDS[type(outcome)], "reward": None, "reason": outcome.reason}


def _show(run: Path, found: Rejudged) -> None:
    changed = amount(len(found.changed), "outcome")
    if found.otherwise:
        changed += f"; {found.otherwise:,} more in their parts or turns only"
    rows: list[Row] = [
        ("judged again", f"{amount(found.attempts, 'attempt')} by {visible(found.judge)}"),
        ("changed", Text(changed, "bold yellow" if found.changed else "green")),
    ]
    for each in found.changed[:SHOWN]:
        before, after = (judged_text(**each[when]) for when in ("before", "after"))
        rows.append(("", Text.assemble(f"sample {each['group_id']}.{each['place']}  ", before, " → ", after)))
    if len(found.changed) > SHOWN:
        rows.append(("", f"and {len(found.changed) - SHOWN:,} more; --json lists all"))
    left = {"without a reply": found.without_reply, "unreadable groups": found.unreadable}
    if any(left.values()):
        rows.append(("left out", ", ".join(f"{count:,} {what}" for what, count in left.items() if count)))
    rows.append(("trained on", "what was there before; `tidemill samples` shows both, `tidemill pairs` takes the latest"))
    show_rows(str(run), rows)
