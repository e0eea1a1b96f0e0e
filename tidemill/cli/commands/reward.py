"""`tidemill reward test`: tests a recipe's reward on replies of known worth."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from tidemill.cli.commands.judging import in_its_workers, scoring_workers, working
from tidemill.cli.commands.screen import console, print_json, print_rows
from tidemill.core.errors import ConfigError
from tidemill.envs.build_environment import make_environment
from tidemill.envs.curriculum import task_order
from tidemill.envs.environment_settings import AnyEnv, environments_of
from tidemill.envs.json_lines import json_lines
from tidemill.envs.tasks import check_data
from tidemill.observability.safe_text import visible
from tidemill.run.hub_names import fetched
from tidemill.run.preflight.reward_audit import Check, Own, check
from tidemill.run.recipe import RunConfig, load_recipe

TASKS = 32
BUDGET_S = 300.0
COLOURS = {"ok": "green", "fails": "bold red", "passes": "bold red", "not judged": "bold yellow", "not checked": "yellow"}


def test(recipe: Path, answers: Path | None, overrides: Sequence[str], as_json: bool) -> int:
    """Show the audit of a reward. Returns 1 when a verdict is bad or missing, else 0."""
    config = load_recipe([recipe], overrides)
    if not config.judged:
        raise ConfigError(f"{recipe} has no reward to test: name one in env.reward")
    own = read_answers(answers) if answers else []
    config = fetched(config.model_copy(update={"model": "new:0.1m"}))  # no model is needed
    with working("reward-test", f"{recipe}: scoring replies whose worth is known", as_json):
        found = asyncio.run(_checks(config, own))
    if as_json:
        print_json(asdict(found[0]) if len(found) == 1 else {"environments": [asdict(each) for each in found]})
    else:
        for each in found:
            _show(each)
    return int(any(line.bad for each in found for line in each.lines))


def read_answers(path: Path) -> list[Own]:
    """The user's own replies from a JSONL file, whose rows `_own` reads."""
    found = [_own(row, where) for where, row in json_lines(path, f"--answers {path}")]
    if not found:
        raise ConfigError(f"--answers {path} is empty: expected one object a line")
    return found


def _own(row: dict[str, Any], where: str) -> Own:
    check_data(row, where)
    if type(row.get("answer")) in (int, float):  # a number, as a column of answers may hold
        row["answer"] = str(row["answer"])
    texts = [row[key] for key in ("reply", "answer") if key in row]
    if len(texts) != 1 or not isinstance(texts[0], str) or not row.keys() <= {"reply", "answer", "expect", "task"}:
        raise ConfigError(f'{where}: expected {{"reply": TEXT or "answer": TEXT, "expect": "pass" or "fail", "task": ID}}')
    expect, task = row.get("expect", "fail"), row.get("task", "")
    if expect not in ("pass", "fail") or not isinstance(task, str):
        raise ConfigError(f"{where}: expect = {expect!r}, task = {task!r}: expected 'pass' or 'fail', and a task's id")
    return Own(texts[0], expect, task, formatted="answer" in row)


async def _checks(config: RunConfig, own: Sequence[Own]) -> list[Check]:
    """Audit each environment by itself, because each has its own verifier."""
    environments = environments_of(config.env)
    if own and len(environments) > 1:
        raise ConfigError(f"--answers are replies to one environment, and the recipe has {len(environments)}: give env=ONE")
    return [await _check(config, each, own) for each in environments]


async def _check(config: RunConfig, written: AnyEnv, own: Sequence[Own]) -> Check:
    async with (
        scoring_workers(config) as scorer,
        in_its_workers(config, make_environment(written, scorer), written) as environment,
    ):
        tasks = environment.tasks("train")
        order = [task_order(len(tasks), config.seed, i) for i in range(min(TASKS, len(tasks)))]  # a run begins with these
        chosen = {tasks[i].id: tasks[i] for i in order}
        named = {each.task for each in own if each.task}
        chosen |= {task.id: task for split in ("train", "eval") for task in environment.tasks(split) if task.id in named}
        if unknown := named - chosen.keys():
            raise ConfigError(f"--answers names task {min(unknown)!r}, and {environment.name} has none of that id")
        limit_s = config.rollout.episode_s
        await scorer.start()  # so that no call includes the start of a process
        how = {"limit_s": limit_s, "budget_s": BUDGET_S, "without_gold": True, "frozen": config.frozen_policies}
        return await check(environment, list(chosen.values()), own=own, **how)


def _show(found: Check) -> None:
    screen = console()
    screen.print(Text.assemble((found.environment, "bold"), f", {found.tasks} tasks"))
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for title in ("kind", "n", "mean score", "passed", "unscorable", "errors", "slowest", "verdict"):
        table.add_column(title, justify="left" if title in ("kind", "verdict") else "right", no_wrap=True)
    for line in found.lines:
        mean = "–" if line.mean is None else f"{line.mean:.3f}"
        slowest = "–" if line.slowest_s is None else f"{line.slowest_s:.2f} s"
        counts = (f"{count:,}" for count in (line.passed, line.unscorable, line.infra_errors))
        verdict = Text(line.verdict, COLOURS[line.verdict])
        table.add_row(*map(Text, [line.kind, str(line.n), mean, *counts, slowest]), verdict)
    screen.print(table)
    if whys := {line.why: line.kind for line in reversed(found.lines) if line.why}:
        print_rows(screen, [(kind, visible(why)) for why, kind in reversed(whys.items())])
