"""Hand-written parts of `docs/algorithms.md`; `entries.page` adds the tables."""

from __future__ import annotations

INTRODUCTION = """
# Algorithms

An algorithm is a choice of five parts: an **advantage** (rewards in, one number a token out), **corrections** (factors on
it), a **policy loss** (one term a token), **further terms** beside it (KL, entropy) and a **reduction** (all terms to one
number). A preset is a choice that was published, and nothing but names and values: each part and each constant can be given
beside its name.

```toml
algorithm = "dapo"
algorithm = { name = "dapo", clip_high = 0.3 }
algorithm = { name = "grpo", loss = "aipo", cap = 4, reduction = "token" }
algorithm = { name = "grpo", old_logprobs = "recompute", corrections = ["veto", { name = "tis", cap = 4 }] }
algorithm = { name = "grpo", reference = { kl = 0.04 } }
algorithm = { name = "dpo", beta = 0.2 }
```

What does not apply to what was chosen is refused, because it would be ignored. `tidemill explain RECIPE` prints the parts
in force, their formulas, and what they come to in a step.

The tables are made from the functions' docstrings (`tidemill/algorithms/`) by `python -m tidemill.cli.algorithm_reference`.
"""

NOTATION = """
## Notation

| | |
|---|---|
| mu | the policy that sampled a token: the engine's logprob, recorded with the token |
| p_hat | the trainer's policy at the start of the step; mu stands in for it unless `old_logprobs = "recompute"` |
| pi | the policy while it is trained: the gradient is its own |
| pi_ref | the reference, another policy: see `reference` |
| r = pi / p_hat | moves with the optimizer inside a step |
| rho = pi / mu | staleness, mismatch and drift together: rho = r k |
| k = p_hat / mu | staleness and mismatch; constant in a step |
| y, \\|y\\| | the sampled tokens of all rows of an attempt, and their number; a prompt, a user or a tool adds none |
| R, A | the reward of an attempt; the advantage of a token |
| G | return-to-go: the sum of the rewards from a token on, each times gamma for each token between |
| mean, std | over the cohort, unless it is said: the attempts that are compared, siblings at one task |
| sg[x] | x without a gradient |

Ratios are of single tokens unless a formula says otherwise. Losses are minimised.
"""

STEP = """
## A step

A step trains on `rollout.groups` groups of `rollout.group_size` attempts at one task each. It is one update of the weights
unless `updates` says otherwise. With `given` nothing is sampled: a group is what its task holds.

```
groups ─▶ rows ─▶ log p_hat, log pi_ref (where asked for) ─▶ A ─▶ times the corrections' factors ─▶ loss: one term a token
  ─▶ + KL, + entropy ─▶ times the reduction's weights ─▶ gradients, added up over micro-batches ─▶ one scale ─▶ AdamW
```

An attempt trains when it has a score, was not cancelled and holds a sampled token; every other one is in no mean and in no
denominator. Denominators are those of a whole update, whatever a clip or a correction drops. A correction is multiplied
into the advantages, which is exact: every policy loss is homogeneous in A.

In the first update of a step pi is p_hat. So with `old_logprobs = "recompute"` and one update r is 1 but for rounding, a
bound on r cuts nothing, and the distance from mu is the corrections' affair. With `"behaviour"` k is 1 and r is rho: a
bound on r bounds staleness and mismatch.
"""

OWN = """
## A part of your own

`loss`, `advantage` and the names in `corrections` may be `FILE.py:function`. The function's keyword-only parameters are its
constants, given beside the other keys: `algorithm = { name = "grpo", loss = "parts.py:soft_clip", width = 0.3 }`.
`parts.py`:

```python
import numpy as np
import torch

from tidemill.algorithms.advantages import Scores
from tidemill.algorithms.corrections import Ratios
from tidemill.algorithms.losses import Loss, LossInput


def soft_clip(x: LossInput, *, width: float = 0.2) -> Loss:
    \"\"\"-width tanh((rho - 1) / width) A, rho = pi / mu.\"\"\"
    rho = (x.logprobs - x.behaviour).exp()  # [N], one a trained token; x.logprobs alone carries a gradient
    return Loss(-width * torch.tanh((rho - 1) / width) * x.advantages, {"ratio": rho})


def above_step(x: Scores, *, limit: float = 2.0) -> np.ndarray:
    \"\"\"R minus the mean of the step, within +-limit.\"\"\"
    return x.spread(np.clip(x.rewards - x.rewards.mean(), -limit, limit))  # [n] attempts -> [M] sampled tokens


def fresh(x: Ratios, *, oldest: float = 1.0) -> np.ndarray:
    \"\"\"1 for tokens at most `oldest` versions old, else 0.\"\"\"
    return (x.lags <= oldest).astype(np.float64)  # [M] factors >= 0
```

A loss may read what engines return with each sampled token. It declares it, and takes it by name: with
`@reads(MODEL_LOGPROBS)` above the function, `x.extra("model_logprobs")` is a tensor [N, ...]. `reads` comes from
`tidemill.algorithms.loss_terms`, and declarations, `TokenExtra(name, dtype, shape)`, from `tidemill.core.token_extras`. The
native engine returns `model_logprobs`. What the engine does not return is refused before the run begins.

A loss should be homogeneous in A (loss(c A) = c loss(A) for c >= 0), else corrections are not exact; on policy its gradient
should be that of -A log pi. An advantage that compares siblings should give exactly 0 where they are equal: what sets
`zero_variance = "drop"` beside it says so, and groups whose rewards are all equal (and whose turns have none) are dropped.
A correction that reads p_hat needs `old_logprobs = "recompute"`: without it `x.old` is None and `x.log_k` an error.
"""

ABOUT = {
    "advantage": """
`algorithm.advantage`. R is an attempt's reward, `given` what is rewarded at tokens besides: turns that a score rewards
(`Score.turns`), and the penalty of `reference.into = "reward"`. It is read by `reinforce_pp`, `process`, `turn_level`,
`remax` and `gae`. For `remax` each group has one greedy attempt more, which is not trained on. `gae` needs a `critic`.
""",
    "loss": """
`algorithm.loss`. "One more forward pass" is what `old_logprobs = "recompute"` costs; without it mu stands in for p_hat.
`gspo`, `gmpo` and `topr` have one term for a whole attempt, so they go with neither an advantage nor a correction that
tells its tokens apart.
""",
    "term": """
Added to the policy loss, on the same tokens and under the same reduction, times a weight of their own: `reference.kl` for
one of `kl_k1`, `kl_k2` and `kl_k3` (`reference.estimator`), with `importance = 1`; `entropy.coefficient` for
`entropy`;
`critic.weight` for `value`, of the critic's values. `score` trains a reward model.
`cross_entropy` is no addition but what a warm-up and `sft` train with.
""",
    "correction": """
`algorithm.corrections`: factors on the advantages, multiplied with one another; KL and entropy are untouched. All but `age`
are of k, and so need `old_logprobs = "recompute"`.
""",
    "reduction": "`algorithm.reduction`. Sums and numbers are of a whole update, not of a micro-batch.",
    "preference": """
`algorithm.preference`, in place of an advantage: the best and the worst attempt at a task are a pair, where their rewards
differ. The loss is `reinforce`, with `old_logprobs = "recompute"`: under these the gradient is that of the loss below, at
the start of the step, so that a step is one update. The reduction `attempt` makes it the mean over pairs. `dpo`, `ipo` and
`kto` need a `reference`. With `given = "pairs"` the pairs are the tasks' own; `kto`, which knows no pairs, takes its replies
from `given = "labels"`, and z, its baseline, from the step's prompts, each with the next one's reply: max(0, mean h).
`bradley_terry` trains a reward model on `given = "pairs"`: the loss is `score`, R what a head on the model (`critic =
"policy"`) says after a reply's end token, and `final/` a folder for sequence classification, for `reward = "model"`.
""",
    "preset": """
The loss's constants are those in force. What a row leaves out has its default. `opd` needs a teacher, `reference.model`.
""",
    "reward": """
* `old_logprobs`: `"behaviour"`, mu stands in for p_hat; `"recompute"`, the trainer computes p_hat, one more forward pass a
  step. Refused where nothing reads it.
* `updates.minibatches`, into how many parts a step's groups are cut, each with an update of its own, and `updates.epochs`,
  how often they are gone over: 1 and 1. More than one update needs `"recompute"`. `max_lag` counts steps, not updates.
* `zero_variance`, of groups in which no attempt can be told from those it is compared with: `"keep"`, they train nothing
  and count in denominators; `"drop"`, another group is sampled for each (DAPO's dynamic sampling). Only for advantages that
  give such a group 0; of an advantage of your own, `"drop"` says that it does.
* `overlong.treat`, of attempts that were cut off: `"keep"`, as any other; `"filter"`, left out of everything, as one
  without a score; `"mask"`, compared with, but not trained on and in no denominator; `"penalty"`, `overlong` below is added
  to every reward, for the attempt's longest reply, with `rollout.max_tokens` for its limit and `overlong.cache` (a fifth of
  that unless it is given).
* `fixed_length`, of the reduction `fixed`, in tokens: `rollout.max_tokens` unless it is given.
* `reference.model`, which is pi_ref: `"initial"`, what the run begins with, or a model folder. After `reference.every`
  updates (0: never) it becomes `reference.decay` times itself + (1 - decay) times pi. It costs a forward pass a step, and
  its weights in float32 in the trainer's process; with `placement.reference_engines` above 0 as many engines serve it from
  processes of their own, in `engine.dtype`. Then it never moves, and nothing is sampled with `top_p`, `top_k` or `min_p`.
* `reference.kl`, the weight of the divergence from it. `reference.into = "loss"`: a further term, by `reference.estimator`:
  `"k3"` unless it is given, `"k1"` or `"k2"`. `"reward"`: -kl log(p_hat / pi_ref) at each token for advantages that read
  `given`, and the sum of it on the attempt's reward for the others.
* `reference.distil`, the weight of `distilled` below, which is added to the advantages: the reference is the teacher.
* `critic.model`, what an answer is worth before each of its tokens, for `gae`: a model of its own that begins as the policy
  does (`"initial"`), as a model or reward model in a folder, or a head on the policy's own decoder (`"policy"`): half the
  memory and time, but then the value loss, times `critic.weight`, pulls at the policy's weights. Its first values are 0. It
  has its own optimizer, with `critic.lr` (the trainer's unless it is given) and its own clipping of gradients; it is in
  every checkpoint. `critic.clip`: see `value`. `critic.lam`: of the returns that it is trained towards, `returns` below; an
  attempt that was cut off has ended like any other. `critic.warmup`: the first steps, in which only the critic learns.
* `entropy.coefficient`, or `entropy = 0.01`: the weight of the further term `entropy`; below 0 it keeps entropy low. With an
  `entropy.target` (nats a token) it is that of the first step only: the weight then goes up or down by `entropy.change` each
  step, see `adaptive_entropy` below. It follows from what the steps recorded, so a run that goes on has the same.
* `preference`, the name of one of the preferences above.
* `given`, what is learnt where nothing is sampled, from columns of the tasks: `"answers"` (`completion`, or `messages`, a
  conversation of which every turn of the assistant's is learnt, or `answer`), `"pairs"` (`chosen` and `rejected`) or
  `"labels"` (`completion`, and `label`, true or false). A reply is learnt with the end token after it. What only sampled
  replies have is refused: corrections, advantages, `overlong`, a divergence in the loss, several updates a step.
  `rollout.group_size` is 1, or 2 for pairs. An environment of rows needs no reward then; with one, greedy accuracy is
  measured too. Held-out rows are told of as the training rows are, by the trainer's forward passes.
* `constants`, a table for constants whose names are settings' too.

What is added to a reward, and to an advantage; what a critic is trained towards; how a weight follows what is measured:
""",
}

LAG = """
## What lag does

[lag.md](lag.md) has the figure and the table, which `python benchmarks/algorithms.py` makes.
"""
