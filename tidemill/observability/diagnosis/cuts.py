"""Limits that cut replies off: the reply's own, the recipe's, or the context."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal

from tidemill.core.types import CUT_AT, OWN_LIMIT, TRUNCATED, Finish, Trajectory

Kind = Literal["own", "recipe", "context", "unknown"]
Limit = tuple[Kind, int]  # (kind, tokens)
REMEDIES: dict[Kind, str] = {
    "own": "raise it where the environment sets it: rollout.max_tokens is for replies without a limit of their own",
    "recipe": "raise rollout.max_tokens",
    "unknown": "raise rollout.max_tokens, or the environment's own max_tokens",
    "context": "raise engine.context as far as the model goes, or shorten prompts and turns",
}


def limit_of(t: Trajectory) -> Limit | None:
    """The limit that ended the last reply; None if none did."""
    if t.finish not in TRUNCATED:
        return None
    if t.finish is Finish.CONTEXT:
        return "context", len(t.tokens)
    if CUT_AT not in t.info:  # recorded by an older version
        return "unknown", t.sampled
    return ("own" if t.info.get(OWN_LIMIT) else "recipe"), int(t.info[CUT_AT])


def limits(attempts: Iterable[Trajectory]) -> Counter[Limit]:
    """The number of attempts that each limit cut off."""
    return Counter(limit for t in attempts if (limit := limit_of(t)) is not None)


def named(limit: Limit) -> str:
    kind, tokens = limit
    said: dict[Kind, str] = {
        "own": f"the environment's or agent's own max_tokens = {tokens:,}",
        "recipe": f"rollout.max_tokens = {tokens:,}",
        "unknown": "a limit that was not recorded",
        "context": f"the context, full at {tokens:,} tokens",
    }
    return said[kind]


def by(found: Counter[Limit]) -> tuple[Kind, str]:
    """(the kind of limit that cut most attempts; all kinds, the commonest first, as the end of a sentence)."""
    kinds: dict[Kind, Counter[Limit]] = {}
    for (kind, tokens), n in found.items():
        kinds.setdefault(kind, Counter())[kind, tokens] += n
    order = sorted(kinds, key=lambda kind: -kinds[kind].total())
    said = {kind: f"by {named(kinds[kind].most_common(1)[0][0])}" for kind in order}
    if len(order) == 1:
        return order[0], f" {said[order[0]]}"
    shares = [f"{kinds[kind].total() / found.total():.0%} of them {said[kind]}" for kind in order]
    return order[0], f", {' and '.join(shares)}"
