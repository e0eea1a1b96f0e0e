"""Checks of a session before its processes start, and the header that says what is about to run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemill.controller.offline_groups import check_offline
from tidemill.core.errors import ConfigError
from tidemill.core.hardware import allow_files, usable_cores
from tidemill.core.hub import shown
from tidemill.envs.curriculum import Curriculum, task_order
from tidemill.envs.environment_mixture import parts_of
from tidemill.envs.environment_settings import AgentSettings, EnvSettings, PythonSettings, RowsSettings, environments_of
from tidemill.ledger.ledger import SqliteLedger
from tidemill.models.conversations import check_prompts
from tidemill.run.preflight.probe_process import Preparation
from tidemill.run.preflight.reward_audit import check
from tidemill.run.recipe import RunConfig
from tidemill.run.sft_warmup import check_answers

if TYPE_CHECKING:
    from tidemill.run.session import Session

FILES, FILES_EACH = 40, 4  # open files of a controller, and for each process that it starts
QUICK_TASKS, QUICK_S = 8, 10.0  # tasks and seconds of the audit of a reward
LOOKED_AT = 64  # groups whose tasks are compared when a run goes on


def expect_files(config: RunConfig) -> None:
    """Raise ConfigError if this process may not open as many files as the run needs."""
    placed_at, scorers = config.placement, config.scoring.workers if config.judged else 0
    players = usable_cores() if placed_at.environment.workers is None else placed_at.environment.workers
    count = placed_at.engines * config.engine_pools + placed_at.reference_engines + players + scorers + 2
    needed = FILES + FILES_EACH * count
    if (allowed := allow_files(needed)) < needed:
        raise ConfigError(
            f"{allowed} open files are allowed here, and this run needs {needed}: allow more (`ulimit -n 1024`, or the hard "
            "limit, which is an administrator's to raise), or start fewer engines and workers"
        )


@contextmanager
def in_one_sentence() -> Iterator[None]:
    """Turn a ValueError into a ConfigError, so that the user sees no traceback."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from None


async def describe(session: Session, preparation: Preparation) -> None:
    """Check the tasks and the memory, and show what is about to run."""
    config, plan, environment, model = session.config, session.plan, session.environment, session.model
    train, held_out = environment.tasks("train"), environment.tasks("eval")
    tasks = [*train, *held_out[: max(config.eval.final_tasks, config.eval.tasks)]]
    tokenizer, architecture = model.tokenizer, model.architecture
    longest = check_prompts(tasks, tokenizer, plan.context, architecture.vocab)
    if config.warmup.accuracy and session.ledger.next_group_id() == 0:
        check_answers(train, tokenizer, architecture.vocab)
    longest_row = longest + config.rollout.max_tokens
    if config.offline:
        longest_row = check_offline(config.offline, tasks, tokenizer, plan.context, architecture.vocab)
    with in_one_sentence():
        await preparation.check_memory(str(model.path), min(longest_row, plan.context))
        session.extras = tuple(await preparation.extras())
        session.frozen = {version.policy: version for version in await preparation.frozen()}
    expect_same_frozen(session)
    synchronous = "synchronous" if config.max_lag == 0 else "asynchronous"
    algorithms = " + ".join(dict.fromkeys(each.name for each in config.algorithms.values()))
    how = f"{synchronous}, max_lag {config.max_lag}: {config.steps} steps of {config.rollout.groups} groups × "
    rows = f"prompts up to {longest} tokens, replies up to {config.rollout.max_tokens}"
    if longest_row > plan.context:
        rows += f", which end where a row has {plan.context}"
    if plan.replayed:
        rows += f"; groups of the {config.data.replay.within} steps before may be trained once more, whatever max_lag"
    if config.offline:
        how = f"nothing is sampled: {config.steps} steps of {config.rollout.groups} tasks × "
        rows = f"rows up to {longest_row} tokens"
    session.monitor.header(
        [
            f"task: {environment.name}, {len(train):,} training and {len(held_out):,} held-out tasks, disjoint",
            f"policy: {architecture.family}, {architecture.layers} layers of {architecture.hidden}, {shown(config.model)}",
            *_policies(config),
            f"training: {algorithms}, {how}{config.rollout.group_size} = {plan.samples} samples",
            f"rows: {rows}",
            *([f"devices: {plan.devices.said()}"] if plan.devices.why else []),
            *filter(None, [plan.context_cut]),
        ]
    )


def _policies(config: RunConfig) -> list[str]:
    """The header's line on several policies; none if there is one."""
    if not config.policies:
        return []
    adapters = [f"{name} (rank {each.config.highest_rank})" for name, each in config.adapters.items()]
    trained = f"adapters {', '.join(adapters)}" if adapters else f"whole models {', '.join(config.trained_policies)}"
    frozen = f"; frozen: {', '.join(config.frozen_policies)}" if config.frozen_policies else ""
    return [f"policies: {trained}{frozen}"]


def expect_same_frozen(session: Session) -> None:
    """Raise ConfigError if a frozen policy is not the one that the run was begun with."""
    known = {version.policy: version for version in session.ledger.versions()}
    for name, version in session.frozen.items():
        if (before := known.get(name, version)) != version:
            raise ConfigError(
                f"policies.{name}.frozen = {session.config.policies[name].frozen!r} holds {version.exact}, and the run was "
                f"begun with {before.exact}: put the folder back as it was, or give another run_dir"
            )


def expect_same_tasks(curriculum: Curriculum, ledger: SqliteLedger, folder: Path) -> None:
    """Raise ConfigError if the tasks are not those that the run was begun with.

    A group's task follows from its number and the tasks, so others would repeat some and leave out some. If the order
    follows from results, each task is looked up by its name.
    """
    admitted = ledger.next_group_id()
    looked_at = {*range(0, admitted, -(-admitted // LOOKED_AT)), admitted - 1}
    if not curriculum.by_number:
        looked_at |= {group_id for group_id, env, name, _ in ledger.history() if curriculum.task_of(env, name) is None}
    for group_id in sorted(looked_at):
        before = ledger.task_of(group_id)
        now = curriculum.choose(group_id) if curriculum.by_number else curriculum.task_of(before.env, before.id)
        if now is None or not ledger.is_task_of(group_id, now):
            what = "none of that name" if now is None else f"{now.id!r}"
            what = "one of that name with other contents" if now is not None and now.id == before.id else what
            raise ConfigError(
                f"the tasks are not those that {folder} was begun with (group {group_id} was to solve "
                f"{before.id!r}, and would now get {what}): put the data back as it was, or give another run_dir"
            )


async def audit_rewards(session: Session) -> None:
    """Audit the reward of each environment. Raises ConfigError when gold fails or garbage passes.

    Failures in scoring.accept do not stop the run, but they are noted and recorded.
    """
    config = session.config
    for environment in parts_of(session.environment):  # each has its own verifier
        tasks = environment.tasks("train")
        first = [tasks[task_order(len(tasks), config.seed, i)] for i in range(min(len(tasks), QUICK_TASKS))]
        limits: dict[str, Any] = {"limit_s": config.rollout.episode_s, "budget_s": QUICK_S}
        found = await check(environment, first, **limits, frozen=frozenset(config.frozen_policies))
        wrong, refused = found.refused(), found.refused(config.scoring.accept)
        over = {name: why for name, why in wrong.items() if name not in refused}
        verdicts = {line.kind: line.verdict for line in found.lines}
        session.ledger.event("reward_check", {"verdicts": verdicts, "accepted": over})
        for name, why in refused.items():
            form = (
                ", and when the right reply has another form: a function `gold` beside the reward" if name == "gold" else ""
            )
            raise ConfigError(
                f"the reward of {environment.name} can not be trained on: {why}. `tidemill reward test RECIPE` shows more; "
                f"when that is how it has to be: scoring.accept=['{name}']{form if name == 'gold' else ''}"
            )
        for name, why in over.items():
            session.note(f"scoring.accept names {name!r}, so the run begins although {why}")
        for line in [line for line in found.lines if line.verdict in ("not judged", "not checked")][:1]:
            unknown = line.verdict == "not checked"
            session.note(f"the reward was not checked, {line.why}" if unknown else f"beware: {line.why}")


def judging_code(env: EnvSettings) -> dict[str, str]:
    """Digest of every FILE.py that the recipe's environments and rewards name, by its path."""
    users = [each for each in environments_of(env) if isinstance(each, PythonSettings | RowsSettings | AgentSettings)]
    named = [each.path if isinstance(each, PythonSettings) else each.reward for each in users]
    references = [name for names in named for name in ([names] if isinstance(names, str) else names)]
    files = [Path(reference.rpartition(":")[0]) for reference in references if ".py:" in reference]
    return {str(path): blake2b(path.read_bytes(), digest_size=16).hexdigest() for path in files if path.is_file()}


def note_changed_code(env: EnvSettings, ledger: SqliteLedger, note: Callable[[str], None]) -> None:
    """Record the code of this start, and note files that differ from the last one."""
    now, before = judging_code(env), json.loads(ledger.meta().get("judging_code", "{}"))
    if changed := sorted(path for path, digest in now.items() if before.get(path, digest) != digest):
        ledger.event("judging_code_changed", {"files": changed})
        note(
            f"warning: {', '.join(changed)} changed since this run was started last: rewards and accuracies from here on "
            "are those of the new code, and no comparison with earlier ones; give another run_dir to begin anew"
        )
    if now != before:
        ledger.set_meta("judging_code", json.dumps(now))
