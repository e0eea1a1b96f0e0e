"""Detection of a run that earned nothing to learn from, with the likely cause."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tidemill.core.amounts import amount
from tidemill.ledger.ledger import SqliteLedger
from tidemill.ledger.records import Earned
from tidemill.observability.diagnosis.cuts import REMEDIES, Limit, by
from tidemill.run.recipe import RunConfig

MOST = 0.5  # share of replies cut off, or of attempts without a score, beyond which that is the first thing to mend
TEST = "`tidemill reward test RECIPE`"


def unearned(ledger: SqliteLedger, config: RunConfig, cut: Counter[Limit] | None = None) -> dict[str, Any] | None:
    """The entry `unearned` of report.json, or None. cut: this process's cut replies."""
    if config.offline or any(each.distils for each in config.algorithms.values()):
        return None
    earned, norm = ledger.earned(), ledger.largest_gradient()
    alike = earned.best == earned.worst
    if not earned.attempts or not (alike or norm == 0):
        return None
    if alike and norm and (earned.best or 0) > 0:  # equal rewards teach, too, if attempts are not compared
        return None
    evaluations, checks = ledger.evaluations(), ledger.events("reward_check")
    cause, text = cause_of(
        earned,
        config,
        begun_with=evaluations[0].accuracy if evaluations else None,
        vouched=any(event.detail.get("verdicts", {}).get("gold") == "ok" for event in checks),
        cut=cut,
    )
    return {"cause": cause, "text": f"{_what(earned, ledger.next_step())}: {text}"}


def _what(earned: Earned, steps: int) -> str:
    during = f"in {amount(steps, 'step')}"
    if not earned.scored:
        return f"nothing was earned {during}, for none of {amount(earned.attempts, 'attempt')} has a score"
    if earned.best == earned.worst:
        every = f"all {earned.scored:,} attempts have the reward {earned.best:g}"
        return f"{'there was nothing to learn' if earned.best else 'nothing was earned'} {during}, for {every}"
    return f"there was nothing to learn {during}, for no step had a gradient"


def cause_of(
    earned: Earned, config: RunConfig, begun_with: float | None, vouched: bool, cut: Counter[Limit] | None = None
) -> tuple[str, str]:
    """The likeliest cause by its name, and a sentence on it and what to do.

    begun_with: held-out accuracy before the first step. vouched: a right answer was seen to earn the full score.
    """
    asked = config.rollout
    if not earned.scored:
        errors = f"{amount(earned.infra_errors, 'infrastructure error')}, {earned.unscorable:,} unscorable"
        first = f", the commonest {earned.reason!r}" if earned.reason else ""
        return "judging", f"judging failed ({errors}{first}); {TEST} shows it without a run"
    if (failed := earned.attempts - earned.scored) > MOST * earned.attempts:
        first = f", the commonest reason {earned.reason!r}" if earned.reason else ""
        return "judging", f"{failed:,} of {earned.attempts:,} attempts have no score{first}; mend that first"
    if earned.solved == earned.scored:
        return "solved", "the model solves every task already; take harder ones"
    if earned.cut > MOST * earned.attempts:
        return "cut", _cut(earned, config, cut or Counter())
    if not vouched and not earned.solved:
        text = f"no right answer has been seen to earn this reward's full score; {TEST} is the first thing to try"
        return "reward", text
    if earned.varied:
        return "left out", _LEFT_OUT.format(varied=amount(earned.varied, "group"))
    if earned.solved:
        return "alike", _ALIKE.format(size=asked.group_size)
    if begun_with:
        text = f"greedy replies solved {begun_with:.0%} of the held-out tasks, and sampled ones none; lower "
        return "sampling", f"{text}rollout.temperature (now {asked.temperature:g}), or set rollout.top_p"
    warm = "" if config.warmup.accuracy else "a warm-up on the tasks' answers (warmup.accuracy = 0.5), "
    return "unsolved", _UNSOLVED.format(warm=warm, size=asked.group_size, test=TEST)


_LEFT_OUT = (
    "the rewards differ within {varied}, and yet nothing of them was trained; look at what algorithm.overlong and "
    "algorithm.corrections leave out"
)
_ALIKE = (
    "the attempts at a task all earned the same, at some the full score and at others less; take tasks in between, more "
    "attempts at each (rollout.group_size, now {size}), or a reward with steps in between"
)
_UNSOLVED = (
    "the model never solves a task, so no attempt is better than another; begin with {warm}a run of algorithm = 'sft' or a "
    "better model, or take easier tasks or more attempts at each (rollout.group_size, now {size}); {test} says what right "
    "answers earn"
)


def _cut(earned: Earned, config: RunConfig, cut: Counter[Limit]) -> str:
    limit, said = config.rollout.max_tokens, f"{earned.cut / earned.attempts:.0%} of the replies were cut off"
    learns = "or begin with a model that ends its replies (a warm-up, or algorithm = 'sft')"
    if cut:
        kind, by_limit = by(cut)
        return f"{said}{by_limit}, before they ended; {REMEDIES[kind]}, {learns}"
    if earned.cut_context > earned.cut / 2:  # an earlier process sampled them: only the record is left
        used = f", now {config.engine.context:,}" if config.engine.context else ""
        return f"{said} where the context was full; raise it (engine.context{used}), shorten prompts, {learns}"
    if earned.longest_cut is not None and earned.longest_cut < limit:
        own = f"the environment's own limit, below rollout.max_tokens = {limit:,}"
        return f"{said} at {earned.longest_cut:,} tokens, {own}; raise that, {learns}"
    return f"{said} at rollout.max_tokens = {limit:,}, before they ended; raise it, {learns}"
