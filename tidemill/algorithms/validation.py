"""Checks that the chosen functions ignore no setting of an algorithm."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from tidemill.algorithms.advantages import ADVANTAGES, NEEDS
from tidemill.algorithms.corrections import CORRECTIONS, PER_TOKEN, WITHOUT_OLD
from tidemill.algorithms.preferences import EVERY_PREFERENCE, OF_SCORES, PREFERENCES, UNPAIRED, WITH_REFERENCE
from tidemill.algorithms.presets import ANCHORED, CROSS_ENTROPY, LOSS_CONSTANTS, PER_SEQUENCE, SCORE
from tidemill.core.import_object import constants_of

if TYPE_CHECKING:
    from tidemill.algorithms.algorithm_settings import AlgorithmSettings

OF_REFERENCE = ("model", "every", "decay", "kl", "estimator", "into", "distil")  # keys of the table `reference`
Constants = dict[str, Any]
"""name -> number; weights of parts are a table"""


def check_applicable(s: AlgorithmSettings) -> None:
    known_losses = (*LOSS_CONSTANTS, CROSS_ENTROPY, SCORE)
    for kind, name, known in (("loss", s.loss, known_losses), ("advantage", s.advantage, ADVANTAGES)):
        if ".py:" not in name:
            expect_name(kind, name, known)
    if s.preference:
        expect_name("preference", s.preference, EVERY_PREFERENCE)
    if all(".py:" not in name for name in (s.loss, s.advantage)):
        expect_constants(s.constants, _takers(s), OF_REFERENCE)
    _expect_given(s)
    _expect_whole(s)
    _expect_reference(s)
    _expect_critic(s)


def _takers(s: AlgorithmSettings) -> dict[str, Constants]:
    """The chosen functions that take constants, with these and their defaults."""
    takers = {f"the loss {s.loss!r}": LOSS_CONSTANTS.get(s.loss, {})}
    if s.preference:
        return takers | {f"the preference {s.preference!r}": constants_of(EVERY_PREFERENCE[s.preference])}
    return takers | {f"the advantage {s.advantage!r}": constants_of(ADVANTAGES[s.advantage])}


def _expect_given(s: AlgorithmSettings) -> None:
    """Refuse settings about sampling if given replies are learnt, and the other way round."""
    if not s.given:
        of_given = {CROSS_ENTROPY: "answers", SCORE: "pairs", **dict.fromkeys(UNPAIRED, "labels")}
        of_given |= dict.fromkeys(OF_SCORES, "pairs")
        for name, value in (("loss", s.loss), ("preference", s.preference)):
            if kind := of_given.get(value):
                raise ValueError(f"{name} = {value!r} is of replies that the tasks give: set given = {kind!r} too")
        return
    kl = s.reference is not None and s.reference.kl > 0
    idle = {
        **{"corrections": bool(s.corrections), "overlong": s.overlong.treat != "keep"},
        **{"zero_variance": s.zero_variance != "keep", "advantage": s.advantage != "none"},
        **{"updates": s.updates.count > 1, "reference.kl": kl, "reference.distil": s.distils},
        "entropy.target": s.entropy.target is not None,
    }
    if found := [name for name, is_set in idle.items() if is_set]:
        raise ValueError(f"{found[0]} does not apply to given = {s.given!r}: it is of what a policy sampled")
    fitting = {"answers": [""], "pairs": [*PREFERENCES, *OF_SCORES], "labels": list(UNPAIRED)}[s.given]
    if s.preference not in fitting:
        expected = " or ".join(filter(None, fitting)) or "none"
        raise ValueError(f"preference = {s.preference!r} does not go with given = {s.given!r}: expected {expected}")
    if s.given == "answers" and s.loss != CROSS_ENTROPY and ".py:" not in s.loss:
        raise ValueError(
            f"the loss {s.loss!r} does not go with given = 'answers': expected {CROSS_ENTROPY!r} or FILE.py:function"
        )
    if s.reduction == "fixed" and s.fixed_length is None:
        raise ValueError(f"reduction = 'fixed' with given = {s.given!r} needs fixed_length: nothing is sampled to a limit")


def _expect_whole(s: AlgorithmSettings) -> None:
    """Refuse combinations in which one setting would be ignored or wrong."""
    recompute = s.recomputes
    if s.fixed_length is not None and s.reduction != "fixed":
        raise ValueError(f"fixed_length does not apply to the reduction {s.reduction!r}: it belongs to 'fixed'")
    names = [each.name for each in s.corrections]
    if (idle := [name for name in names if name not in WITHOUT_OLD and ".py:" not in name]) and not recompute:
        raise ValueError(
            f"the correction {idle[0]!r} is of p_hat / mu, which is 1 unless old_logprobs = 'recompute': set that too"
        )
    if s.loss in PER_SEQUENCE and (uneven := [name for name in names if name in PER_TOKEN]):
        raise ValueError(
            f"the correction {uneven[0]!r} weighs each token for itself, and the loss {s.loss!r} has one term for "
            f"a whole attempt: use {', '.join(sorted(set(CORRECTIONS) - PER_TOKEN))}, or another loss"
        )
    reads_old = s.loss in ANCHORED or ".py:" in s.loss or names or s.reference or s.preference
    if s.updates.count > 1 and not recompute:
        raise ValueError(
            f"{s.updates.count} updates a step need old_logprobs = 'recompute': the later ones are held against the "
            "policy that the step began with"
        )
    if s.updates.count > 1 and "opsm" in names:
        raise ValueError(f"the correction 'opsm' is of the policy before it moves: no {s.updates.count} updates a step")
    if s.preference and s.updates.count > 1:
        raise ValueError(f"preference = {s.preference!r} is exact for one update a step; given: {s.updates.count}")
    uneven = s.distils or s.tells_tokens_apart
    if s.loss in PER_SEQUENCE and uneven and not s.preference:
        raise ValueError(
            f"the loss {s.loss!r} has one term for a whole attempt, and "
            f"{'distil' if s.distils else repr(s.advantage)} tells its tokens apart: use another loss"
        )
    if s.scores != (s.loss == SCORE) or (s.scores and recompute):
        raise ValueError(
            f"preference = {s.preference!r} with the loss {s.loss!r} and old_logprobs = {s.old_logprobs!r}: a "
            f"reward model is trained with {' or '.join(OF_SCORES)}, the loss {SCORE!r} and 'behaviour'"
        )
    if s.preference and not s.scores and not (recompute and s.loss == "reinforce"):
        raise ValueError(
            f"preference = {s.preference!r} needs old_logprobs = 'recompute' and the loss 'reinforce', under which "
            f"its gradient is exact; given were {s.old_logprobs!r} and {s.loss!r}"
        )
    if recompute and not reads_old:
        raise ValueError(f"old_logprobs = 'recompute' does not apply to the loss {s.loss!r}: it compares with mu only")
    if s.zero_variance == "drop" and not s.compares:
        raise ValueError(
            f"zero_variance = 'drop' does not apply to the advantage {s.advantage!r}: where all rewards of a group "
            "are equal it has a gradient all the same; use 'keep'"
        )


def _expect_reference(s: AlgorithmSettings) -> None:
    reads = s.preference in WITH_REFERENCE
    if reads and s.reference is None:
        raise ValueError(f"preference = {s.preference!r} needs a reference policy: set reference = 'initial'")
    if s.reference is not None and not (reads or s.reference.kl or s.reference.distil):
        raise ValueError("reference is given and nothing reads it: set reference.kl, reference.distil or a preference")


def _expect_critic(s: AlgorithmSettings) -> None:
    if s.scores:
        others = s.critic is not None and s.critic.model_dump(exclude={"model", "lr"}, exclude_defaults=True)
        if s.critic is None or s.critic.model != "policy" or others:
            raise ValueError(
                f"preference = {s.preference!r} needs critic = 'policy', a head on the model that is trained, and "
                "takes nothing else of it but lr"
            )
        return
    reads = NEEDS.get(s.advantage) == "values" and not s.preference
    if reads and s.critic is None:
        raise ValueError(f"advantage = {s.advantage!r} needs a critic: set critic = 'initial'")
    if s.critic is not None and not (reads or ".py:" in s.advantage):
        raise ValueError(f"critic is given and nothing reads it: set advantage = 'gae', not {s.advantage!r}")


def expect_name(kind: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, list(known), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"{kind} {name!r}: {hint}expected {', '.join(known)} or FILE.py:function")


def expect_constants(given: Constants, takers: Mapping[str, Constants], of_reference: Collection[str] = ()) -> None:
    """Raise ValueError for a constant that no taker takes. takers: taker -> its constants."""
    for name in given:
        if not any(name in own for own in takers.values()):
            near = difflib.get_close_matches(name, [n for own in takers.values() for n in own], n=1)
            if name in of_reference:
                near = [f"reference.{name}"]
            hint = f"; did you mean {near[0]!r}?" if near else ""
            takes = "; ".join(f"{who} takes {', '.join(own) or 'none'}" for who, own in takers.items())
            raise ValueError(f"{name} does not apply: {takes}{hint}")
