"""Presets: published algorithms as sets of function names and constants.

A value that a preset leaves out is the default of `AlgorithmSettings`; a constant that it leaves out is its function's
default. This module does not import torch, so the constants of losses are repeated here in a table.
"""

from __future__ import annotations

from typing import Any

LOSS_CONSTANTS: dict[str, dict[str, float]] = {
    "reinforce": {},
    "ppo_clip": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 0.0},
    "aipo": {"cap": 5.0},
    "a3po": {"clip_low": 0.2, "clip_high": 0.2},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "gspo_token": {"clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"clip_low": 1.0, "clip_high": 4.0},
    "sapo": {"tau_positive": 1.0, "tau_negative": 1.05},
    "dppo_tv": {"delta": 0.15},
    "dppo_kl": {"delta": 0.05},
    "gmpo": {"bound": 0.4},
    "importance": {},
    "topr": {"cap": 1.0},
    "rollout_mask": {"clip_low": 0.2, "clip_high": 0.28},
}
"""The policy losses and their constants; a test holds that `losses` has the same."""

ANCHORED = frozenset({"ppo_clip", "gspo", "gspo_token", "cispo", "sapo", "gmpo"})  # read p_hat, the others mu or neither
PER_SEQUENCE = frozenset({"gspo", "gmpo", "topr"})  # one term for a whole attempt: its tokens have one advantage

CROSS_ENTROPY = "cross_entropy"  # the loss of given answers; it reads no advantage
SCORE = "score"  # the loss of a reward model
ATTEMPTS = {"answers": 1, "pairs": 2, "labels": 1}  # replies that a task gives, by `AlgorithmSettings.given`


def _of(advantage: str, loss: str, reduction: str, **others: Any) -> dict[str, Any]:
    """A preset from the three functions that every preset names, and its other settings."""
    return {"advantage": advantage, "loss": loss, "reduction": reduction, **others}


_RECOMPUTE = {"old_logprobs": "recompute"}
_FROM_PAIRS = _of("none", "reinforce", "attempt", given="pairs", **_RECOMPUTE)
_INITIAL = {"reference": {"model": "initial"}}

PRESETS: dict[str, dict[str, Any]] = {
    "grpo": _of("grpo", "ppo_clip", "sequence"),
    "dr_grpo": _of("dr_grpo", "ppo_clip", "fixed"),
    "dapo": _of("grpo", "ppo_clip", "token", zero_variance="drop", constants={"clip_high": 0.28}),
    "rloo": _of("rloo", "ppo_clip", "token"),
    "reinforce_pp": _of("reinforce_pp", "ppo_clip", "token"),
    "reinforce_pp_baseline": _of("reinforce_pp_baseline", "ppo_clip", "token"),
    "ppo": _of("gae", "ppo_clip", "token", critic={"model": "initial"}),
    "remax": _of("remax", "ppo_clip", "token"),
    "maxrl": _of("maxrl", "aipo", "sequence"),
    "opo": _of("opo", "aipo", "token"),
    "gdpo": _of("gdpo", "ppo_clip", "sequence"),
    "pass_at_k": _of("pass_at_k", "ppo_clip", "token", constants={"clip_high": 0.28}),
    "aipo": _of("dr_grpo", "aipo", "token"),
    "decoupled_ppo": {
        **_of("grpo", "ppo_clip", "token", **_RECOMPUTE),
        "corrections": [{"name": "icepop", "constants": {"low": 0.0, "high": 5.0}}],
    },
    "a3po": _of("grpo", "a3po", "token"),
    "gspo": _of("grpo", "gspo", "sequence"),
    "cispo": _of("grpo", "cispo", "token"),
    "sapo": _of("grpo", "sapo", "sequence"),
    "dppo": _of("grpo", "dppo_tv", "token"),
    "gmpo": _of("grpo", "gmpo", "sequence"),
    "m2po": _of("grpo", "importance", "token", **_RECOMPUTE, corrections=[{"name": "m2po"}]),
    "topr": _of("dr_grpo", "topr", "attempt"),
    "glm5": _of("grpo", "rollout_mask", "token"),
    "scalerl": _of("grpo_batch", "aipo", "prompt", zero_variance="drop"),
    "online_dpo": _of("none", "reinforce", "attempt", preference="dpo", **_INITIAL, **_RECOMPUTE, zero_variance="drop"),
    "opd": _of("none", "importance", "token", reference={"distil": 1.0}, **_RECOMPUTE),
    "sft": _of("none", CROSS_ENTROPY, "token", given="answers"),
    "dpo": {**_FROM_PAIRS, "preference": "dpo", **_INITIAL},
    "ipo": {**_FROM_PAIRS, "preference": "ipo", **_INITIAL},
    "orpo": {**_FROM_PAIRS, "preference": "orpo"},
    "simpo": {**_FROM_PAIRS, "preference": "simpo"},
    "reward_model": _of("none", SCORE, "attempt", given="pairs", preference="bradley_terry", critic={"model": "policy"}),
    "kto": {**_FROM_PAIRS, "given": "labels", "preference": "kto", **_INITIAL},
}

NOTES = {
    "grpo": "DeepSeekMath, 2402.03300; without its KL term, which reference.kl adds",
    "dr_grpo": "Dr. GRPO, 2503.20783; no division by the spread, and by a constant length only: the longest completion",
    "dapo": "DAPO, 2503.14476; clip-higher, dynamic sampling, token mean as in its code (the paper prints the prompt mean)",
    "rloo": "RLOO, 2402.14740; leave-one-out baseline, with a clip of each token and the mean over tokens",
    "reinforce_pp": "REINFORCE++, 2501.03262; one attempt a prompt is enough, whitened over the step",
    "reinforce_pp_baseline": "REINFORCE++-baseline, 2501.03262; the group's mean as baseline, whitened over the step",
    "ppo": "PPO, 1707.06347; advantages from a critic, so that one attempt a prompt is enough",
    "remax": "ReMax, 2310.10505; the greedy answer is the baseline: one attempt more at each task",
    "maxrl": "MaxRL, 2602.02710; its on-policy gradient, corrected for the sampler as AIPO is",
    "opo": "OPO, 2505.23585; derived for steps that are on policy; off policy it is corrected as AIPO is",
    "gdpo": "GDPO, 2601.05242; several rewards, each normalised on its own",
    "pass_at_k": "Pass@k Training, 2508.10751; attempts are worth what they add to the best of k",
    "aipo": "LlamaRL, 2505.24034; made for asynchronous training: corrects for the sampling policy and drops nothing",
    "decoupled_ppo": "Decoupled PPO, 2110.00641, AReaL, 2505.24298; around p_hat; what k makes too heavy is dropped",
    "a3po": "A-3PO, 2512.06547; as decoupled_ppo without its forward pass: p_hat lies between mu and pi by the token's age",
    "gspo": "GSPO, 2507.18071; the ratio of whole attempts",
    "cispo": "MiniMax-M1, 2506.13585; the ratio is cut and its gradient kept",
    "sapo": "SAPO, 2511.20347; a soft gate in place of the clip",
    "dppo": "DPPO, 2602.04879; a trust region on the probability itself",
    "gmpo": "GMPO, 2507.20673; the geometric mean of the ratios",
    "m2po": "M2PO, 2510.01161; the second moment of the ratios is bounded by leaving out the few largest",
    "topr": "TOPR, 2503.14286; successes weigh 1, failures what the policy still thinks of them",
    "glm5": "GLM-5, 2602.15763; what lies outside the band gives nothing",
    "scalerl": "ScaleRL, 2510.13786; CISPO on mu, prompt mean, normalised over the batch, no group without a signal",
    "online_dpo": "Online DPO, 2402.04792; a verifier is the judge: the best and the worst attempt at a task are a pair",
    "opd": "On-policy distillation, as MOPD in 2601.02780; a token's reward is what a teacher thinks of it: the reference",
    "sft": "maximum likelihood; nothing is sampled: each task's completion, messages or answer is learnt",
    "dpo": "DPO, 2305.18290; nothing is sampled: each task's chosen and rejected reply are a pair",
    "ipo": "IPO, 2310.12036; as dpo, with a margin that is to be reached and not passed",
    "orpo": "ORPO, 2403.07691; as dpo, with cross-entropy on the chosen one in place of a reference",
    "simpo": "SimPO, 2405.14734; as dpo, with means over tokens in place of a reference",
    "reward_model": "Bradley-Terry; a head on the model learns which of two replies is better: final/ is a reward model",
    "kto": "KTO, 2402.01306; nothing is sampled: each task's completion is good or bad, as its label says",
}
"""The paper of each preset, and what to know about it."""
