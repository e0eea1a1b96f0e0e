"""Checks that blocks compute each row alike on this machine, for `batch_invariant`.

No library promises it. It mostly depends on the number of threads: with three of them a vector loop may be cut in the middle
of a row, and its remainder is computed by another formula. So an engine checks before it serves, with its own weights: a
sequence is computed in order, then its last block again in other orders and among other rows. Inputs and outputs of every
module are compared, because a difference in the last place may be rounded away before the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tidemill.core.errors import ConfigError
from tidemill.engine.native.batch_invariant import BLOCK, TILE, Rows, compute
from tidemill.engine.native.paged_attention import PagedCache
from tidemill.engine.native.staged_weights import Weights
from tidemill.models.decoder import Decoder, RMSNorm

PROMPT = -(-2 * TILE // BLOCK) * BLOCK  # tokens: more than one tile, whole blocks


@torch.inference_mode()
def check_machine(weights: Weights, page_size: int) -> None:
    """Raise ConfigError if a row's bits depend on its place or on the other rows of a block."""
    pages = -(-PROMPT // page_size)
    cache = PagedCache(weights.decoder.arch, pages + 1, page_size, torch.float32, torch.device("cpu"))
    table = np.arange(1, pages + 1)[None]

    def values(positions: np.ndarray) -> list[Tensor]:
        rows = Rows(positions * 7919 % len(weights.head), positions, np.zeros_like(positions), positions + page_size)
        with _watched(weights.decoder) as seen:
            logits = F.linear(compute(weights, cache, rows, table), weights.head)
        logprobs = torch.log_softmax(logits, dim=-1)
        return [*seen, logits, logprobs, logprobs.exp()]

    for begin in range(0, PROMPT - BLOCK, BLOCK):
        values(np.arange(begin, begin + BLOCK))
    block = np.arange(PROMPT - BLOCK, PROMPT)
    expected = values(block)
    every, odd = np.arange(BLOCK), np.arange(1, BLOCK, 2)
    for order in (*(np.roll(every, by) for by in (1, 2, BLOCK // 2)), every[::-1].copy()):
        company = block[order]
        company[::2] -= block[0]
        for positions, rows in ((block[order], every), (company, odd)):
            found = values(positions)
            if not all(_equal(f[rows], e[order[rows]]) for f, e in zip(found, expected, strict=True)):
                raise ConfigError(
                    f"engine.batch_invariant: on this machine, with {torch.get_num_threads()} threads, a row's bits depend "
                    "on the rows beside it; give the engine one thread (placement.engine_threads=1) or turn it off"
                )


@contextmanager
def _watched(decoder: Decoder) -> Iterator[list[Tensor]]:
    """Collect the inputs and outputs of the decoder's norms and projections, all [BLOCK, ...]."""
    seen: list[Tensor] = []

    def keep(module: nn.Module, given: tuple[Any, ...], result: Any) -> None:
        seen.extend((given[0], result))

    hooks = [m.register_forward_hook(keep) for m in decoder.modules() if isinstance(m, nn.Linear | RMSNorm)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _equal(a: Tensor, b: Tensor) -> bool:
    """True when two tensors are equal bit for bit, NaNs included."""
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))
