"""Runs a plan on the model: hidden states, sampled tokens, logprobs of scored rows.

The head is float32 on every path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tidemill.engine.native.paged_attention import PagedCache
from tidemill.engine.native.sampler import RowParams, Sampled, alternatives, sample
from tidemill.engine.native.staged_weights import Weights
from tidemill.engine.native.step_plan import Plan
from tidemill.models.kernels.library import without_gradient

LOGITS_BYTES = 64 << 20  # bytes of logits of scored positions that are computed together


@dataclass(slots=True)
class Probe:
    """Scored rows [first, last) of a step, with the tokens to score."""

    first: int
    last: int
    targets: np.ndarray  # [last - first] int64: the tokens that follow
    temperature: float
    top_k: int


@dataclass(slots=True)
class Probed:
    """Logprobs of scored rows."""

    logprobs: np.ndarray  # [n] float32
    top_ids: np.ndarray  # [n, k] int32, k may be 0
    top_logprobs: np.ndarray  # [n, k] float32


@dataclass(slots=True)
class Output:
    """The result of a step."""

    sampled: Sampled
    top_ids: np.ndarray | None  # [S, k] int32, of the unmodified model
    top_logprobs: np.ndarray | None  # [S, k] float32
    probed: list[Probed]


@torch.inference_mode()
def run(
    weights: Weights, cache: PagedCache, plan: Plan, table: np.ndarray, ask: RowParams, top: int, probes: list[Probe]
) -> Output:
    """Run one step. top: how many alternatives to report for the sampled rows."""
    sampled = len(plan.sample_rows)
    wanted = np.concatenate([plan.sample_rows, *(np.arange(p.first, p.last) for p in probes)])
    hidden, *scored = cache.hidden(weights, plan, table, wanted).split([sampled, *(p.last - p.first for p in probes)])
    cache.copy(plan.copies)
    logits = weights.logits(hidden)
    top_ids = top_logprobs = None
    if top:
        top_ids, top_logprobs = alternatives(torch.log_softmax(logits, dim=-1), top)
    probed = [_probe(rows, weights, p) for rows, p in zip(scored, probes, strict=True)]
    return Output(sample(logits, ask, without_gradient(logits)), top_ids, top_logprobs, probed)


@torch.inference_mode()
def launch(weights: Weights, cache: PagedCache, plan: Plan, table: np.ndarray, ask: RowParams) -> Callable[[], Output]:
    """Launch a step on a cache that runs `ahead`. Calling the returned function waits for it."""
    hidden = cache.hidden(weights, plan, table, plan.sample_rows)
    cache.copy(plan.copies)
    sampled = cache.sampling(weights.logits(hidden), ask)
    return lambda: Output(sampled(), None, None, [])


@dataclass(slots=True)
class UnderWay:
    """A step that has been launched."""

    plan: Plan
    epochs: np.ndarray  # [S] the versions that sample its tokens, among those served
    read: Callable[[], Output]  # waits for it


def _probe(hidden: Tensor, weights: Weights, probe: Probe) -> Probed:
    targets = torch.from_numpy(probe.targets).to(hidden.device)[:, None]
    rows = max(1, LOGITS_BYTES // (4 * len(weights.head)))
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for at in range(0, len(hidden), rows):
        logprobs = torch.log_softmax(weights.logits(hidden[at : at + rows]) / probe.temperature, dim=-1)
        chosen = logprobs.gather(1, targets[at : at + rows]).squeeze(1).cpu().numpy()
        parts.append((chosen, *alternatives(logprobs, probe.top_k)))
    return Probed(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
