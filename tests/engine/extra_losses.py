"""Losses that read what engines return with each token, and hold it against what the trainer computes itself."""

from __future__ import annotations

import torch

from tidemill.algorithms.loss_terms import Loss, LossInput, reads
from tidemill.core.token_extras import MODEL_LOGPROBS, TokenExtra


@reads(TokenExtra("entropy", "float32", fill=-1))
def by_entropy(x: LossInput) -> Loss:
    """-A log pi, weighed by the entropy at which the engine sampled the token."""
    assert x.entropy is not None
    return _same(x, x.extra("entropy"), x.entropy.detach())


@reads(MODEL_LOGPROBS)
def by_surprise(x: LossInput) -> Loss:
    """-A log pi, weighed by the engine's logprob under the unmodified model; of runs at temperature 1."""
    return _same(x, -x.extra("model_logprobs"), -x.logprobs.detach())


@reads(TokenExtra("entropy", "float64"))
def of_another_kind(x: LossInput) -> Loss:
    return Loss(-x.advantages * x.logprobs)


def _same(x: LossInput, engine: torch.Tensor, trainer: torch.Tensor) -> Loss:
    torch.testing.assert_close(engine, trainer.to(engine.dtype), atol=1e-3, rtol=0)
    return Loss(-engine * x.advantages * x.logprobs, {"of_engine": engine})
