"""Tidemill's losses, advantages, corrections and preferences on given tensors: a value, and gradients by what was given.

A step is N attempts in order of their groups, its tensors padded to [N, T] as elsewhere; whatever is found of tokens is
padded likewise, with 0 where nothing is trained. See `against_trl.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tidemill.algorithms.advantages import Scores, advantage_by_name
from tidemill.algorithms.algorithm_settings import AlgorithmSettings
from tidemill.algorithms.corrections import Ratios, correct, correction_by_name
from tidemill.algorithms.losses import LossFunction, LossInput, evaluate, loss_by_name
from tidemill.algorithms.preferences import PREFERENCES, WITH_REFERENCE, Pairs, bradley_terry, kto, kto_baseline
from tidemill.algorithms.prepare_step import ConfiguredAlgorithm
from tidemill.algorithms.reductions import reduction
from tidemill.algorithms.token_rows import POLICY, REFERENCE
from tidemill.core.types import Array, Finish, Group, LossSpec, Sample, Score, Task, Trajectory, Unscorable

PROMPT = 2  # tokens
Found = dict[str, Array]
Named = tuple[str, dict[str, Any]]
"""A function and its constants"""


class Given:
    """The tensors of a step. feed: by which names they go, as (what is read -> name)."""

    def __init__(self, tensors: dict[str, Array], feed: dict[str, Any], rows: slice = slice(None)) -> None:
        self.tensors, self.feed, self.rows = tensors, feed, rows
        self.groups, lengths = tensors["groups"][rows], tensors[feed["lengths"]]
        self.mask = (np.arange(lengths.max()) < lengths[:, None])[rows]
        if feed.get("tools"):
            self.mask &= self.of("tools")[:, : self.mask.shape[1]].astype(bool)
        self.lengths = self.mask.sum(1)
        self.sequence = np.repeat(np.arange(len(lengths[rows])), self.lengths)

    def of(self, name: str) -> Array:
        return self.tensors[self.feed[name]][self.rows]

    def flat(self, name: str) -> Array:
        """[M] of the trained tokens; mu is p_hat where it is not told apart."""
        values = self.of("old" if name == "mu" and not self.feed.get("mu") else name)
        return values[:, : self.mask.shape[1]][self.mask]

    def padded(self, values: Any) -> Array:
        found = np.zeros(self.mask.shape)
        found[self.mask] = values
        return found

    def with_feed(self, **feed: Any) -> Given:
        return Given(self.tensors, self.feed | feed, self.rows)

    def halves(self) -> tuple[Given, Given]:
        """The micro-batches, of whole groups."""
        n = len(self.tensors["groups"])
        return Given(self.tensors, self.feed, slice(0, n // 2)), Given(self.tensors, self.feed, slice(n // 2, n))

    def advantages(self, advantage: Named) -> Array:
        """[N] one of each attempt."""
        rewards = self.of("rewards")
        parts = {f"part{k}": column for k, column in enumerate(rewards.T)} if rewards.ndim > 1 else {}
        scores = Scores(rewards if rewards.ndim == 1 else rewards.sum(1), self.groups, self.lengths, parts)
        return advantage_by_name(*advantage)(scores)[np.cumsum(self.lengths) - self.lengths]


def policy(
    g: Given,
    loss: Named | LossFunction,
    kind: str,
    *,
    advantage: Named | Array = ("grpo", {"eps": 1e-4}),
    also: Sequence[LossSpec] = (),
    corrections: Sequence[Named] = (),
    anchor: str = "old",
    fixed: int | None = None,
) -> Found:
    """From rewards to the gradient. anchor: what the corrections take for p_hat. fixed: a length, for that reduction."""
    of_row = advantage if isinstance(advantage, np.ndarray) else g.advantages(advantage)
    advantages, found = np.repeat(of_row, g.lengths), {"advantages": of_row}
    if corrections:
        lags = np.zeros(len(advantages), np.int64)
        ratios = Ratios(g.flat(anchor), g.flat("mu"), advantages, g.lengths, lags)
        factors, _ = correct(ratios, [correction_by_name(*each) for each in corrections])
        advantages, found["factors"] = advantages * factors, g.padded(factors)
    weights, scale = reduction(kind, g.lengths, g.groups, fixed)
    live, entropy = (torch.tensor(g.flat(name)).requires_grad_() for name in ("live", "entropy"))
    x = LossInput(
        *(live, *(torch.tensor(each) for each in (g.flat("mu"), g.flat("old"), advantages, g.sequence)), len(g.lengths)),
        reference=torch.tensor(g.flat("ref")),
        entropy=entropy,
    )
    function = loss if callable(loss) else loss_by_name(LossSpec(*loss, tuple(also)))
    total, _ = evaluate(function, x, torch.tensor(np.repeat(weights, g.lengths)))
    (total * scale).backward()
    found |= {"loss": np.array(total.item() * scale), "gradient": g.padded(live.grad)}
    return found | ({} if entropy.grad is None else {"entropy gradient": g.padded(entropy.grad)})


def micro_batches(g: Given, *args: Any, **more: Any) -> Found:
    """Each half as if it were the step, and their mean."""
    first, second = (policy(half, *args, **more) for half in g.halves())
    gradient = np.concatenate([first["gradient"], second["gradient"]]) / 2
    return {"loss": (first["loss"] + second["loss"]) / 2, "gradient": gradient}


def whole_attempts(g: Given, loss: Named, advantage: Named) -> Found:
    """The loss with one token for each attempt: its ratio is the product over the attempt."""
    sums = {name: (g.padded(g.flat(name))).sum(1, keepdims=True) for name in ("live", "old", "ref", "entropy")}
    one = Given(g.tensors | sums | {"ones": np.ones_like(g.lengths)}, {name: name for name in sums} | {"lengths": "ones"})
    found = policy(one, loss, "attempt", advantage=g.advantages(advantage))
    return found | {"gradient": g.padded(np.repeat(found["gradient"][:, 0], g.lengths))}


def whole_step(g: Given, settings: dict[str, Any], size: int, longest: int, *, scaled: float = 1.0) -> Found:
    """A step as a run makes it, float32 where it stores that: groups, `prepare`, the losses on its samples."""
    algorithm = ConfiguredAlgorithm(AlgorithmSettings.preset(**settings), longest)
    groups = [each for each in _groups(g, size) if algorithm.drop_reason(each) is None]
    rows = algorithm.rows(groups, 0)
    places = [int(np.flatnonzero(g.groups == row.group)[row.attempt]) for row in rows]

    def logprobs(name: str) -> list[Array]:
        return [np.append(np.zeros(PROMPT), g.of(name)[i, : g.lengths[i]]).astype(np.float32) for i in places]

    known = {who: logprobs({POLICY: "old", REFERENCE: "ref"}[who]) for who in algorithm.asks}
    prepared = algorithm.prepare(groups, 0, rows, known)
    live = torch.tensor(g.of("live")).requires_grad_()
    (update,), advantages = prepared.updates, np.zeros(len(g.lengths))
    assert update.samples == prepared.samples
    total = torch.zeros((), dtype=torch.float64)
    for i, sample in zip(places, update.samples, strict=True):
        x, weights = _input(sample, live[i])
        total = total + evaluate(loss_by_name(prepared.losses[sample.loss]), x, weights)[0]
        advantages[i] = float(x.advantages[0])
    total = total * update.scale * scaled
    total.backward()
    gradient = live.grad[:, : g.mask.shape[1]].numpy()
    found = {"loss": np.array(total.item()), "gradient": gradient}
    return found if settings.get("corrections") else found | {"advantages": advantages}


def preference_step(t: dict[str, Array], settings: dict[str, Any], longest: int) -> Found:
    """`whole_step` on pairs, siblings of one group each. The chosen ones do not stand first: the rewards tell."""
    n = len(t["pair_lengths"])
    order = np.arange(n).reshape(2, -1).T.ravel()
    names = {
        "live": "pair_live",
        "old": "pair_live",
        "ref": "pair_ref",
        "lengths": "pair_lengths",
        "rewards": "pair_rewards",
    }
    beside = {name: t[given][order] for name, given in names.items()} | {"groups": np.arange(n) // 2 + 1}
    found = whole_step(Given(beside, {name: name for name in names}), settings, 2, longest)
    gradient = np.zeros_like(t["pair_live"])
    gradient[order, : found["gradient"].shape[1]] = found["gradient"]
    return {"gradient": gradient}


def _input(sample: Sample, live: Any) -> tuple[LossInput, Any]:
    """One sample as the trainer reads it, and the weights of its tokens. live: at least as long as they are."""

    def pick(array: Array) -> Any:
        return torch.tensor(array[sample.mask], dtype=torch.float64)

    own, reference = pick(sample.advantages), sample.ref_logprobs
    old = pick(sample.logprobs if sample.old_logprobs is None else sample.old_logprobs)
    sequence = torch.zeros(len(own), dtype=torch.int64)
    known = None if reference is None else pick(reference)
    return LossInput(live[: len(own)], pick(sample.logprobs), old, own, sequence, 1, known), pick(sample.weights)


def _groups(g: Given, size: int) -> list[Group]:
    groups = []
    for at in range(0, len(g.lengths), size):
        groups.append(Group(int(g.groups[at]), Task("t", "p")))
        for i in range(at, at + size):
            mask = np.arange(PROMPT + g.lengths[i]) >= PROMPT
            logprobs = np.zeros(len(mask), np.float32)
            logprobs[mask] = g.of("mu" if g.feed.get("mu") else "old")[i, : g.lengths[i]]
            finish = Finish.LENGTH if g.feed.get("truncated") and g.of("truncated")[i] else Finish.STOP
            reward = float(g.of("rewards")[i])
            outcome = Unscorable("no gold answer") if np.isnan(reward) else Score(reward)
            tokens, versions = np.arange(len(mask), dtype=np.int32), np.where(mask, 0, -1).astype(np.int32)
            one = Trajectory(tokens, mask, logprobs, versions, finish, outcome, sample=i - at)
            groups[-1].trajectories.append(one)
    return groups


def _attempts(leaf: Any, live: Any, advantages: Array, lengths: Array) -> Array:
    """The gradient by `leaf` of `reinforce`, a mean over attempts, with these advantages [n]. live: [sum of lengths]."""
    weights, scale = reduction("attempt", lengths, np.zeros_like(lengths))
    x = replace(_alone(live), advantages=torch.tensor(np.repeat(advantages, lengths)))
    total, _ = evaluate(loss_by_name(LossSpec("reinforce")), x, torch.tensor(np.repeat(weights, lengths)))
    (total * scale).backward()
    return leaf.grad.numpy()


def _alone(live: Any) -> LossInput:
    """Tokens of which a loss reads nothing but their logprobs, and perhaps advantages."""
    nothing = torch.zeros_like(live.detach())
    return LossInput(live, nothing, nothing, nothing, nothing.long(), 1)


def _kept(lengths: Array, width: int) -> Array:
    return np.arange(width) < lengths[:, None]


def pairs(lengths: Array, live: Array, reference: Array | None, *, whole: bool = False) -> Pairs:
    """whole: an answer counts as one token. The chosen ones stand first."""
    kept, p = _kept(lengths, live.shape[1]), len(lengths) // 2
    counts = np.ones_like(lengths) if whole else lengths
    sums = [np.split((values * kept).sum(1), 2) for values in (live, *(() if reference is None else (reference,)))]
    return Pairs(*sums[0], counts[:p], counts[p:], *(sums[1] if reference is not None else (None, None)))


def preference(t: dict[str, Array], name: str, constants: dict[str, Any], *, whole: bool = False, by: str = "") -> Found:
    """by: the order of the rewards by which an answer of each pair is the chosen one; as they stand where it is empty."""
    lengths, live, reference = t["pair_lengths"], t["pair_live"], t["pair_ref"]
    p = len(lengths) // 2
    order = np.arange(2 * p)
    if by:
        worse = t[by][:p] < t[by][p:]
        order = np.concatenate([np.where(worse, order[p:], order[:p]), np.where(worse, order[:p], order[p:])])
    found = PREFERENCES[name](pairs(lengths[order], live[order], reference[order], whole=whole), **constants)
    advantages = np.zeros(2 * p)
    advantages[order] = 2 * np.concatenate([found.chosen, found.rejected])
    leaf = torch.tensor(live).requires_grad_()
    gradient = _attempts(leaf, leaf[torch.tensor(_kept(lengths, live.shape[1]))], advantages, lengths)
    return {"loss": np.array(found.loss.mean()), "gradient": gradient}


def preference_of_logits(
    t: dict[str, Array], name: str, constants: dict[str, Any], lengths: Array, *, prompt: int = 1, whole_rows: bool = False
) -> Found:
    """whole_rows: orpo's supervised term as the mean over all predicted tokens of the chosen rows, prompts included."""
    logits, ids, p = torch.tensor(t["logits"]).requires_grad_(), torch.tensor(t["pair_ids"]), len(lengths) // 2
    live = logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    answers = live[:, prompt - 1 :]
    values = answers.detach().numpy()
    given = pairs(lengths, values, np.zeros_like(values) if name in WITH_REFERENCE else None)
    found = PREFERENCES[name](given, **constants)
    chosen, loss = found.chosen, found.loss.mean()
    if whole_rows:
        without = PREFERENCES[name](given, weight=0.0)
        rows = live[:p][torch.tensor(_kept(lengths[:p] + prompt - 1, live.shape[1]))]
        ones = torch.full_like(rows.detach(), 1 / len(rows))
        supervised, _ = evaluate(loss_by_name(LossSpec("cross_entropy")), _alone(rows), ones)
        supervised.backward(retain_graph=True)
        chosen, loss = chosen - without.chosen, loss - without.loss.mean() + supervised.item()
    advantages = 2 * np.concatenate([chosen, found.rejected])
    gradient = _attempts(logits, answers[torch.tensor(_kept(lengths, answers.shape[1]))], advantages, lengths)
    return {"loss": np.array(loss), "gradient": gradient}


def unpaired(t: dict[str, Array], feed: dict[str, str], constants: dict[str, float]) -> Found:
    lengths, width = t["pair_lengths"], t["pair_live"].shape[1]
    kept = _kept(lengths, width)
    own, reference, other, other_reference = (
        (t[name] * kept).sum(1) for name in ("pair_live", "pair_ref", feed["shifted_live"], feed["shifted_ref"])
    )
    found = kto(own, reference, t["desirable"], z=kto_baseline(other, other_reference), **constants)
    leaf = torch.tensor(t["pair_live"]).requires_grad_()
    gradient = _attempts(leaf, leaf[torch.tensor(kept)], found.advantages, lengths)
    return {"loss": np.array(found.loss.mean()), "gradient": gradient}


def reward_model(t: dict[str, Array], centre: float) -> Found:
    chosen, rejected = np.split(t["scores"], 2)
    length = np.ones(len(chosen), np.int64)
    found = bradley_terry(Pairs(chosen, rejected, length, length), margin=t["margin"], centre=centre)
    p = len(found.loss)
    return {"loss": np.array(found.loss.mean()), "gradient": -np.concatenate([found.chosen, found.rejected]) / p}
