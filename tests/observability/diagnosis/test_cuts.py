"""Which limit cut a reply off, by what was recorded when it did."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from tidemill.core.types import CUT_AT, OWN_LIMIT, Finish, Group, Score, Task, Trajectory
from tidemill.observability.diagnosis.cuts import REMEDIES, by, limit_of, limits
from tidemill.observability.diagnosis.symptoms import Symptoms


def cut(finish: Finish, **info: float) -> Trajectory:
    tokens, mask = np.arange(6, dtype=np.int32), np.array([0, 0, 1, 1, 1, 1], bool)
    zero = np.zeros(6, np.float32)
    return Trajectory(tokens, mask, zero, np.where(mask, 0, -1).astype(np.int32), finish, Score(0.0), info=info)


OWN = cut(Finish.LENGTH, **{CUT_AT: 4.0, OWN_LIMIT: 1.0})
RECIPE = cut(Finish.LENGTH, **{CUT_AT: 256.0, OWN_LIMIT: 0.0})
CONTEXT = cut(Finish.CONTEXT)
CASES = {
    "own": (OWN, ("own", 4), "by the environment's or agent's own max_tokens = 4"),
    "recipe": (RECIPE, ("recipe", 256), "by rollout.max_tokens = 256"),
    "context": (CONTEXT, ("context", 6), "by the context, full at 6 tokens"),
    "unknown": (cut(Finish.LENGTH), ("unknown", 4), "by a limit that was not recorded"),
}


@pytest.mark.parametrize("kind", CASES)
def test_the_limit_that_cut_is_named_with_its_remedy(kind: str):
    attempt, limit, said = CASES[kind]
    assert limit_of(attempt) == limit and by(limits([attempt])) == (kind, f" {said}")
    groups = [Group(0, Task("t", "p"), [attempt, replace(cut(Finish.STOP), sample=1)])]
    text = next(told for told in Symptoms().look(groups, {"train/truncated": 0.5}) if "cut off" in told)
    remedy = REMEDIES[kind]
    assert f"50% of the attempts were cut off {said}: " in text and f". {remedy[0].upper()}{remedy[1:]}, or set" in text
    assert ("Raise rollout.max_tokens" in text) is (kind in ("recipe", "unknown"))


def test_several_limits_are_told_with_their_shares_the_commonest_first():
    found = limits([RECIPE, *[OWN] * 3, cut(Finish.STOP), cut(Finish.ENV_DONE)])
    assert found == Counter({("own", 4): 3, ("recipe", 256): 1})
    kind, said = by(found)
    assert kind == "own" and said.startswith(", 75% of them by the environment's or agent's own max_tokens = 4")
    assert said.endswith("and 25% of them by rollout.max_tokens = 256")
