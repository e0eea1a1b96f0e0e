"""What of TRL's is put beside what of Tidemill's, and why they differ where they do. See `against_trl.py`.

Constants are TRL's on both sides; `grpo`'s eps is 1e-4 throughout. `equal` says what else had to be set, or left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from definitions import (
    Found,
    Given,
    micro_batches,
    policy,
    preference,
    preference_of_logits,
    preference_step,
    reward_model,
    unpaired,
    whole_attempts,
    whole_step,
)

from tidemill.algorithms.losses import Loss, LossInput, gspo, kl_k3
from tidemill.core.types import Array, LossSpec

SIZE, LONGEST = 4, 16  # attempts of a group, the longest that may be sampled
EXACT, ROUNDED = 1e-6, 1e-5  # float64, float32
ONLY_TRL = (
    "loss_type='vespo'; top_entropy_quantile; adaptive entropy; RLOO's normalize_advantages; DPO's loss types other than "
    "sigmoid and ipo, its f-divergences, ld_alpha and WPO weights; AlphaPO; TPO; A2PO; GKD and the other distillations over "
    "the whole vocabulary"
)
Tensors = dict[str, Array]
Mine = Callable[[Tensors, Given], Found]


@dataclass(frozen=True)
class Row:
    """One of TRL's definitions and ours beside it."""

    what: str
    trainer: str
    settings: dict[str, Any]  # TRL's
    ours: str
    mine: Mine
    feed: dict[str, Any] = field(default_factory=dict)  # what is read -> the name of its tensor
    equal: str = ""
    why: str = ""  # they differ, and why
    accounted: Mine | None = None  # ours with that accounted for
    feed_accounted: dict[str, Any] = field(default_factory=dict)  # what TRL reads, with that accounted for
    micro: int = 1  # micro-batches
    tolerance: float = EXACT

    def cases(self) -> list[dict[str, Any]]:
        """For `systems/trl_definitions.py`: as it is and, where they differ, with that accounted for."""
        feeds = [self.fed, self.fed | self.feed_accounted] if self.why else [self.fed]
        case = {"trainer": self.trainer, "settings": self.settings, "micro": self.micro, "group": SIZE, "longest": LONGEST}
        return [case | {"feed": feed} for feed in feeds]

    @property
    def fed(self) -> dict[str, Any]:
        same = {name: name for name in ("live", "old", "ref", "entropy", "lengths", "rewards")}
        return same | self.feed


def rows() -> list[Row]:
    return [*losses(), *reductions(), *advantages(), *corrections(), *divergences(), *preferences(), *steps()]


CLIP = {"epsilon": 0.2, "epsilon_high": 0.28}
PPO = ("ppo_clip", {"clip_low": 0.2, "clip_high": 0.28})
LEVEL = {"importance_sampling_level": "sequence", "epsilon": 0.1, "epsilon_high": 0.15}
BAND = {"clip_low": 0.1, "clip_high": 0.15}
ON_POLICY, SAMPLED = {"live": "old"}, {"mu": "mu"}  # pi = p_hat; the sampler's logprobs go along
LEAVE_ONE_OUT = ("rloo", {})


def grpo(what: str, loss: str, settings: dict[str, Any], ours: str, mine: Mine, *feed: dict[str, Any], **more: Any) -> Row:
    return Row(what, "GRPO", {"loss_type": loss} | CLIP | settings, ours, mine, *feed, **more)


def rloo(what: str, settings: dict[str, Any], ours: str, mine: Mine, *feed: dict[str, Any], **more: Any) -> Row:
    return Row(what, "RLOO", {"beta": 0.0} | CLIP | settings, ours, mine, *feed, **more)


def step(*args: Any, **more: Any) -> Mine:
    return lambda _, g: policy(g, *args, **more)


def gradient(mine: Mine) -> Mine:
    """Without the value: -A log pi and -A r have one gradient on policy, and two values."""
    return lambda t, g: {name: value for name, value in mine(t, g).items() if name != "loss"}


def losses() -> list[Row]:
    dual = ("ppo_clip", PPO[1] | {"dual_clip": 1.5})
    taus = {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
    capped, cap = ("cispo", {"clip_low": 1.0, "clip_high": 0.5}), {"epsilon_high": 1.5}
    anchored = "epsilon_high is the cap, here 1 + clip_high"
    reinforce = gradient(step(("reinforce", {}), "attempt", advantage=LEAVE_ONE_OUT))
    per_token, one = step(PPO, "token", advantage=LEAVE_ONE_OUT), step(PPO, "attempt", advantage=LEAVE_ONE_OUT)
    return [
        grpo("clip", "grpo", {}, "ppo_clip, sequence", step(PPO, "sequence")),
        grpo("dual clip", "dapo", {"delta": 1.5}, "ppo_clip dual_clip, token", step(dual, "token")),
        grpo("GSPO", "grpo", LEVEL, "gspo, sequence", step(("gspo", BAND), "sequence")),
        grpo("GSPO", "grpo", LEVEL, "gspo_token, sequence", step(("gspo_token", BAND), "sequence")),
        grpo("LUSPO", "luspo", LEVEL, "gspo, attempt", step(("gspo", BAND), "attempt")),
        grpo("CISPO", "cispo", cap, "cispo, token", step(capped, "token"), equal=anchored),
        grpo("CISPO on mu", "cispo", cap, "aipo, token", step(("aipo", {"cap": 1.5}), "token"), {"old": "mu"}),
        grpo("SAPO", "sapo", taus, "sapo, sequence", step(("sapo", {}), "sequence")),
        Row("GMPO", "GMPO", {}, "gmpo, sequence", step(("gmpo", {"bound": 0.4}), "sequence"), equal="epsilon is bound"),
        rloo(
            *("clip of attempts", {}, "rloo, ppo_clip, token", per_token),
            why="TRL clips the product of an attempt's ratios; the preset rloo each token's, and has the mean over tokens",
            accounted=lambda _, g: whole_attempts(g, PPO, LEAVE_ONE_OUT),
        ),
        rloo("clip of attempts of one token", {}, "rloo, ppo_clip, attempt", one, {"lengths": "ones"}),
        rloo("REINFORCE on policy", {}, "rloo, reinforce, attempt", reinforce, ON_POLICY, equal="gradient only"),
        grpo(
            *("ratios beyond e^20", "grpo", {}, "ppo_clip, sequence", step(PPO, "sequence"), {"old": "far"}),
            why="a log ratio is held at +-20 and passes no gradient there; TRL's has no bound",
            feed_accounted={"clamp": 20.0},
        ),
    ]


def reductions() -> list[Row]:
    token, sequence = step(PPO, "token"), step(PPO, "sequence")
    none, constant = {"scale_rewards": "none"}, step(PPO, "fixed", advantage=("dr_grpo", {}), fixed=LONGEST)
    length, bonus = "fixed_length = max_completion_length", {"entropy_coef": 0.05}
    terms = [LossSpec("entropy", weight=0.05)]

    def two_reductions(_: Tensors, g: Given) -> Found:
        alone, more = policy(g, PPO, "token"), policy(g, PPO, "token", also=terms)
        found = policy(g, PPO, "sequence")
        found["loss"] = found["loss"] + more["loss"] - alone["loss"]
        return found | {"entropy gradient": more["entropy gradient"]}

    return [
        grpo("token mean", "dapo", {}, "ppo_clip, token", token),
        grpo("token mean", "bnpo", {}, "ppo_clip, token", token),
        grpo("constant length", "dr_grpo", none, "dr_grpo, ppo_clip, fixed", constant, equal=length),
        grpo("2 micro-batches", "grpo", {}, "ppo_clip, sequence", sequence, micro=2),
        grpo("2 micro-batches", "dapo", {}, "ppo_clip, token", token, micro=2),
        grpo("2 micro-batches", "dr_grpo", none, "dr_grpo, ppo_clip, fixed", constant, equal=length, micro=2),
        grpo(
            *("2 micro-batches", "bnpo", {}, "ppo_clip, token", token),
            why="bnpo's denominator is each micro-batch's own: its gradient depends on how a step is cut, ours does not",
            accounted=lambda _, g: micro_batches(g, PPO, "token"),
            micro=2,
        ),
        grpo("tool tokens", "dapo", {}, "ppo_clip, token", token, {"tools": "tools"}),
        grpo("entropy", "dapo", bonus, "ppo_clip, entropy, token", step(PPO, "token", also=terms)),
        grpo(
            *("entropy", "grpo", bonus, "ppo_clip, entropy, sequence", step(PPO, "sequence", also=terms)),
            why="TRL's bonus is a mean over tokens whatever the loss type; ours has the step's one reduction",
            accounted=two_reductions,
        ),
    ]


def advantages() -> list[Row]:
    weights = [1.0, 0.5, 0.25]
    several = {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": weights}
    gdpo = ("gdpo", {"weights": {f"part{k}": weight for k, weight in enumerate(weights)}})
    constants = {"epsilon_low": 0.2, "epsilon_high": 0.28}

    def raw_spread(_: Tensors, g: Given) -> Found:
        centred = g.advantages(("dr_grpo", {}))
        return policy(g, PPO, "sequence", advantage=centred / (g.of("rewards").std(ddof=1) + 1e-4))

    def biased_spread(_: Tensors, g: Given) -> Found:
        spread = np.repeat(g.of("rewards").reshape(-1, SIZE).std(1), SIZE)
        return policy(g, PPO, "token", advantage=g.advantages(("dr_grpo", {})) / (spread + 1e-8))

    def of(*advantage: Any, kind: str = "sequence") -> Mine:
        return step(PPO, kind, advantage=advantage)

    return [
        grpo("no spread", "grpo", {"scale_rewards": "none"}, "dr_grpo, ppo_clip, sequence", of("dr_grpo", {})),
        grpo("GDPO", "grpo", several, "gdpo, ppo_clip, sequence", of(*gdpo), {"rewards": "parts"}),
        grpo(
            *("batch's spread", "grpo", {"scale_rewards": "batch"}),
            *("grpo_batch, ppo_clip, sequence", of("grpo_batch", {"eps": 1e-4})),
            why="TRL divides by the spread of the raw rewards, that between prompts included; grpo_batch (ScaleRL) by that "
            "of R - mean: one factor for the whole step",
            accounted=raw_spread,
        ),
        Row(
            *("asynchronous GRPO", "AsyncGRPO", constants, "grpo, ppo_clip, token"),
            *(of("grpo", {"eps": 1e-8}, kind="token"), {"old": "mu", "mu": "mu"}, "eps = 1e-8"),
            why="its worker divides by the standard deviation of n, TRL's other trainers and we by that of n - 1",
            accounted=biased_spread,
            tolerance=ROUNDED,
        ),
    ]


def corrections() -> list[Row]:
    def at(mode: str, low: float | None, high: float) -> dict[str, Any]:
        given = {"mode": mode, "clip_min": low, "clip_max": high}
        return {f"vllm_importance_sampling_{name}": value for name, value in given.items()}

    def by(name: str, *, anchor: str = "old", **constants: float) -> Mine:
        return step(PPO, "token", corrections=[(name, constants)], anchor=anchor)

    opsm, cut, refused = {"off_policy_mask_threshold": 0.1}, at("token_truncate", None, 1.4), "the settings refuse it"
    uneven = step(("gspo", BAND), "sequence", corrections=[("tis", {"cap": 1.4})])
    return [
        grpo("token, cut", "dapo", cut, "tis", by("tis", cap=1.4), SAMPLED),
        grpo("token, masked", "dapo", at("token_mask", 0.7, 1.6), "icepop", by("icepop", low=0.7, high=1.6), SAMPLED),
        grpo("a bound of 1", "dapo", at("token_mask", 1.0, 1.6), "icepop", by("icepop", low=1.0, high=1.6), SAMPLED),
        grpo(
            "sequence, cut", "dapo", at("sequence_truncate", None, 1.4), "tis_sequence", by("tis_sequence", cap=1.4), SAMPLED
        ),
        grpo(
            *("sequence, masked", "dapo", at("sequence_mask", 0.4, 2.5)),
            *("mis_sequence", by("mis_sequence", low=0.4, high=2.5), SAMPLED),
        ),
        grpo("token, cut, under GSPO", "grpo", LEVEL | cut, "gspo, tis, sequence", uneven, SAMPLED, equal=refused),
        grpo("OPSM, before pi moves", "dapo", opsm, "opsm", by("opsm", delta=0.1), ON_POLICY | SAMPLED),
        grpo(
            *("OPSM, once pi has moved", "dapo", opsm, "opsm", by("opsm", delta=0.1), {"live": "gone"} | SAMPLED),
            why="TRL asks the live policy in each pass; ours asks p_hat, once a step: the same in its first update only",
            accounted=by("opsm", anchor="live", delta=0.1),
        ),
    ]


def divergences() -> list[Row]:
    def k3(importance: float) -> dict[str, Any]:
        return {"also": [LossSpec("kl_k3", {"importance": importance}, weight=0.1)]}

    def ratio_to_p_hat(_: Tensors, g: Given) -> Found:
        alone, more = (policy(g.with_feed(mu=None), PPO, "token", **each) for each in ({}, k3(1.0)))
        found = policy(g, PPO, "token", **cut)
        return found | {name: found[name] + more[name] - alone[name] for name in ("loss", "gradient")}

    def ratio_of_sequence(x: LossInput) -> Loss:
        """k3 times gspo's live ratio, which is what is left of that with A = -1 and no bound."""
        ratio = gspo(replace(x, advantages=-torch.ones_like(x.advantages)), clip_low=1.0, clip_high=1e9).terms
        return Loss(gspo(x, **BAND).terms + 0.1 * ratio * kl_k3(x, importance=0.0).terms)

    beta, plain, cut = {"beta": 0.1}, {"use_bias_correction_kl": False}, {"corrections": [("tis", {"cap": 3.0})]}
    return [
        grpo("k3", "dapo", beta | plain, "kl_k3 importance 0", step(PPO, "token", **k3(0.0))),
        grpo("k3 times the ratio", "dapo", beta, "kl_k3 importance 1", step(PPO, "token", **k3(1.0))),
        grpo(
            *("k3 times the ratio, mu not p_hat", "dapo", beta | {"vllm_importance_sampling_mode": "token_truncate"}),
            *("kl_k3 importance 1, tis", step(PPO, "token", **cut, **k3(1.0)), SAMPLED),
            why="TRL's ratio is pi / p_hat also where mu sampled the token, which leaves a bias; ours is pi / mu",
            accounted=ratio_to_p_hat,
        ),
        grpo(
            *("k3 times the ratio, under GSPO", "grpo", beta | LEVEL),
            *("gspo, kl_k3 importance 1, sequence", step(("gspo", BAND), "sequence", **k3(1.0))),
            why="TRL's ratio is then the sequence's geometric mean, ours each token's pi / mu: only this one is without "
            "bias, as TRL's documentation says too",
            accounted=step(ratio_of_sequence, "sequence"),
        ),
    ]


def preferences() -> list[Row]:
    def paired(name: str, **more: Any) -> Mine:
        return lambda t, _: preference(t, name, {"beta": 0.1}, **more)

    def by_logits(name: str, lengths: str = "pair_lengths", **more: Any) -> Mine:
        own = {key: more.pop(key) for key in ("prompt", "whole_rows") if key in more}
        return lambda t, _: preference_of_logits(t, name, more, t[lengths], **own)

    sigmoid, ipo = ({"loss_type": name, "beta": 0.1} for name in ("sigmoid", "ipo"))
    smoothed = {"loss_type": "sigmoid", "beta": 0.3, "label_smoothing": 0.1, "cpo_alpha": 0.0}
    simpo = {"loss_type": "simpo", "beta": 2.5, "simpo_gamma": 1.375, "cpo_alpha": 0.0}
    weights = {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.5}
    any_length, one_length = {"lengths": "pair_lengths"}, {"lengths": "pair_even"}
    up, down = {"shifted_live": "up", "shifted_ref": "down"}, {"shifted_live": "down", "shifted_ref": "up"}
    conservative, even = by_logits("dpo", beta=0.3, label_smoothing=0.1), by_logits("orpo", lengths="pair_even", weight=0.1)
    rounded = {"tolerance": ROUNDED}
    return [
        Row("DPO", "DPO", sigmoid, "dpo", paired("dpo")),
        Row("IPO", "DPO", ipo, "ipo", paired("ipo")),
        Row("conservative DPO", "CPO", smoothed, "dpo label_smoothing", conservative, any_length, "references of 0"),
        Row(
            *("SimPO", "CPO", simpo, "simpo", by_logits("simpo", beta=2.5, gamma_ratio=0.55), any_length),
            equal="simpo_gamma = gamma_ratio * beta",
        ),
        Row(
            "ORPO", "ORPO", {"beta": 0.1}, "orpo", even, one_length, "prompts of one token, chosen of one length", **rounded
        ),
        Row(
            *("ORPO", "ORPO", {"beta": 0.1}, "orpo", by_logits("orpo", prompt=3, weight=0.1), any_length | {"prompt": 3}),
            why="TRL's supervised term is one mean over the tokens of the batch's chosen rows, prompts included; ours a "
            "mean over each answer's own, so that a pair's gradient does not depend on the others",
            accounted=by_logits("orpo", prompt=3, whole_rows=True, weight=0.1),
            tolerance=ROUNDED,
        ),
        Row("KTO", "KTO", weights, "kto", lambda t, g: unpaired(t, g.feed, weights), up),
        Row("KTO, z at 0", "KTO", weights, "kto", lambda t, g: unpaired(t, g.feed, weights), down),
        Row(
            "Bradley-Terry",
            "Reward",
            {"center_rewards_coefficient": 0.01},
            "bradley_terry",
            lambda t, _: reward_model(t, 0.01),
        ),
        Row("online DPO", "OnlineDPO", sigmoid, "dpo", paired("dpo", by="pair_rewards")),
        Row(
            *("online IPO", "OnlineDPO", ipo, "ipo", paired("ipo", by="pair_rewards")),
            why="this trainer takes sums where TRL's DPOTrainer and we take means over tokens, as IPO's authors confirmed",
            accounted=paired("ipo", by="pair_rewards", whole=True),
        ),
    ]


def steps() -> list[Row]:
    """Whole steps: settings as a user writes them, on both sides."""

    def of(settings: dict[str, Any], scaled: Callable[[Given], float] = lambda _: 1.0, **more: Any) -> Mine:
        return lambda _, g: whole_step(g, settings | more, SIZE, LONGEST, scaled=scaled(g))

    def trained(g: Given) -> float:
        return float(1 - g.of("truncated").mean())

    def scored(g: Given) -> float:
        return float(g.lengths[~np.isnan(g.of("rewards"))].sum() / g.lengths.sum())

    dapo = {"name": "dapo", "eps": 1e-4, "zero_variance": "keep"}
    plain = {"name": "grpo", "eps": 1e-4, "clip_high": 0.28, "overlong": "mask"}
    defaults = of(dapo, clip_high=0.2, old_logprobs="recompute", corrections={"name": "mis_sequence", "high": 3.0})
    penalised = {"name": "rloo", "loss": "reinforce", "reduction": "attempt", "old_logprobs": "recompute"}
    penalised |= {"reference": {"kl": 0.1, "into": "reward"}}
    masked, cut, rounded = {"mask_truncated_completions": True}, {"truncated": "truncated"}, {"tolerance": ROUNDED}
    vllm, paper = {"vllm_importance_sampling_mode": "sequence_mask"}, {"epsilon": 3e-4, "epsilon_high": 4e-4}
    pairs, beta = gradient(lambda t, _: preference_step(t, {"name": "online_dpo", "beta": 0.1}, LONGEST)), {"beta": 0.1}
    return [
        Row(
            "TRL's defaults with vLLM", "GRPO", vllm, "dapo, keep, clip_high 0.2, mis_sequence", defaults, SAMPLED, **rounded
        ),
        grpo("GSPO's preset", "grpo", LEVEL | paper, "gspo", of({"name": "gspo", "eps": 1e-4}), **rounded),
        rloo(
            *("KL off the reward", beta, "rloo, reinforce, attempt, kl into reward"),
            *(gradient(of(penalised)), ON_POLICY, "gradient only"),
            **rounded,
        ),
        Row("online DPO's preset", "OnlineDPO", {"loss_type": "sigmoid"} | beta, "online_dpo", pairs, **rounded),
        grpo("cut off, masked", "dapo", masked, "dapo, overlong mask", of(dapo, overlong="mask"), cut, **rounded),
        grpo(
            *("cut off, masked", "grpo", masked, "grpo, overlong mask", of(plain), cut),
            why="TRL counts attempts without a trained token in the mean over attempts; ours counts what trains",
            accounted=of(plain, trained),
            tolerance=ROUNDED,
        ),
        grpo(
            *("attempts without a score", "dapo", {}, "dapo", of(dapo), {"rewards": "some"}),
            why="TRL gives them an advantage of 0 and counts their tokens; ours leaves them out of every denominator",
            accounted=of(dapo, scored),
            tolerance=ROUNDED,
        ),
        grpo(
            *("groups without a spread", "dapo", {}, "dapo", of({"name": "dapo", "eps": 1e-4})),
            why="the preset has DAPO's dynamic sampling: such groups are not in the step; TRL counts their tokens",
            accounted=of(dapo),
            tolerance=ROUNDED,
        ),
    ]
