"""How per-token terms become one number: a weight for each sample's tokens and one scale for the whole step (I6).

    gradient = scale * sum over samples i of weight_i * sum over its trained tokens t of grad term_it

The denominators are those of the whole optimizer step, counted in tokens the loss was asked for, before a clip or a
correction drops any: a dropped token has a zero gradient, it does not make the others heavier.
"""

from __future__ import annotations

import numpy as np

from tidemill.types import Array

REDUCTIONS = ("token", "sequence", "prompt", "fixed")


def reduction(kind: str, lengths: Array, groups: Array, fixed: int | None = None) -> tuple[Array, float]:
    """Weights [n] float64 and the scale, of n samples with `lengths` [n] trained tokens, `groups` [n] prompt ids.

    token: the mean over all tokens of the step. sequence: the mean over samples of their token means (GRPO).
    prompt: the mean over prompts of their token means (the objective printed in DAPO, 2503.14476).
    fixed: the sum over (samples * `fixed`), a constant length (Dr. GRPO, 2503.20783).
    Samples without a trained token count in no denominator; a step without any has scale 0.
    """
    lengths, groups = np.asarray(lengths, np.int64), np.asarray(groups)
    if lengths.shape != groups.shape or lengths.ndim != 1:
        raise ValueError(f"lengths {lengths.shape} and groups {groups.shape}: expected one number a sample in each")
    trained = lengths > 0
    weights = trained.astype(np.float64)
    match kind:
        case "token":
            count = lengths.sum()
        case "sequence":
            weights /= np.maximum(lengths, 1)
            count = trained.sum()
        case "prompt":
            _, prompt = np.unique(groups, return_inverse=True)
            tokens = np.bincount(prompt, weights=lengths)
            weights /= np.maximum(tokens, 1)[prompt]
            count = (tokens > 0).sum()
        case "fixed":
            if fixed is None or fixed < 1:
                raise ValueError(f"reduction 'fixed' with length {fixed!r}: expected a positive number of tokens")
            count = trained.sum() * fixed
        case _:
            raise ValueError(f"reduction {kind!r}: expected one of {', '.join(REDUCTIONS)}")
    return weights, 1.0 / float(count) if count else 0.0
