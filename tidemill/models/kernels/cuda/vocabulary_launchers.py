"""Launchers of the Triton kernels over rows of logits: sampling, logprobs, entropies, gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tidemill.models.kernels.cuda.transfers import fetched, sent

SampledRows = tuple[np.ndarray, np.ndarray, np.ndarray]
"""(tokens int64, logprobs float32, unmodified model's logprobs float32), each [n]"""
VOCABULARY_BLOCK = 2048  # logits that a program reads at a time


class VocabularyLaunchers:
    """The part of `Gpu` that samples from logits and differentiates them."""

    def __init__(self, source: Any) -> None:
        """source: the module `triton_kernels`, which is imported only where Triton is."""
        self._source = source

    def sample(self, logits: Tensor, temperature: np.ndarray, uniform: np.ndarray) -> SampledRows:
        """As `Native.sample`."""
        unread = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
        return self.sampling(logits, temperature, uniform, unread)()

    def sampling(
        self, logits: Tensor, temperature: np.ndarray, uniform: np.ndarray, into: Tensor
    ) -> Callable[[], SampledRows]:
        """Launch `sample`; return a function that waits for its result.

        The tokens are also written to `into` [>= n] int32, for kernels launched next: valid ids whatever the logits are."""
        n, vocab = logits.shape
        assert logits.is_contiguous() and logits.dtype == torch.float32 and into.dtype == torch.int32
        if not n:
            return lambda: (np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros(0, np.float32))
        device, blocks = logits.device, -(-vocab // VOCABULARY_BLOCK)
        greedy = temperature == 0
        sharpness = np.where(greedy, 0, 1 / np.where(greedy, 1, temperature))
        sharp, given = sent(np.stack((sharpness, uniform)), device)
        found = torch.empty((n, blocks, 4), dtype=torch.float32, device=device)
        likeliest = torch.empty((n, blocks), dtype=torch.int32, device=device)
        out = torch.empty((3, n), dtype=torch.float64, device=device)
        self._source.survey[(n, blocks)](logits, vocab, sharp, found, likeliest, BLOCK=VOCABULARY_BLOCK, num_warps=4)
        self._source.draw[(n,)](
            *(logits, vocab, sharp, given, found, likeliest, out, into, n, blocks),
            WIDTH=power(blocks),
            BLOCK=VOCABULARY_BLOCK,
            num_warps=8,
        )
        come, done = fetched(out)

        def read() -> SampledRows:
            if done is not None:
                done.synchronize()  # bounded: by what was launched
            tokens, logprobs, model = come.numpy()
            numbers = np.isfinite(logprobs)
            return np.where(numbers, tokens, 0).astype(np.int64), logprobs.astype(np.float32), model.astype(np.float32)

        return read

    def feed(self, tokens: Tensor, sampled: Tensor) -> Tensor:
        """tokens [N] int32, with each token t < 0 replaced by sampled[-1 - t]."""
        out = torch.empty_like(tokens)
        block = 256
        self._source.feed[(-(-len(tokens) // block),)](tokens, sampled, out, len(tokens), BLOCK=block, num_warps=4)
        return out

    def summarise(
        self, logits: Tensor, temperature: Tensor, targets: Tensor, entropy: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(log sum exp, the targets' logprobs, entropies if wanted), each [n] float32.

        They are of the softmax of logits [n, V] / temperature [n], both float32; targets [n] int64. Logits of -inf are
        left out."""
        n, vocab = logits.shape
        assert logits.is_contiguous() and logits.dtype == temperature.dtype == torch.float32
        totals, logprobs, entropies = torch.empty((3, n), dtype=torch.float32, device=logits.device)
        self._source.summarise[(n,)](
            *(logits, temperature, targets, totals, logprobs, entropies, vocab),
            BLOCK=VOCABULARY_BLOCK,
            ENTROPY=entropy,
            num_warps=8,
        )
        return totals, logprobs, entropies if entropy else None

    def differentiate(
        self,
        logits: Tensor,
        temperature: Tensor,
        targets: Tensor,
        totals: Tensor,
        entropies: Tensor,
        d_logprobs: Tensor | None,
        d_entropies: Tensor | None,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Gradient by the logits [n, V], written over them, or in another dtype.

        It comes from d_logprobs and d_entropies, the gradients by `summarise`'s outputs."""
        n, vocab = logits.shape
        assert logits.is_contiguous() and logits.dtype == torch.float32
        out = logits if dtype == logits.dtype else torch.empty((n, vocab), dtype=dtype, device=logits.device)
        self._source.differentiate[(n, -(-vocab // VOCABULARY_BLOCK))](
            *(logits, out, temperature, targets, totals, entropies),
            *(logits if d_logprobs is None else d_logprobs, logits if d_entropies is None else d_entropies, vocab),
            BLOCK=VOCABULARY_BLOCK,
            LOGPROBS=d_logprobs is not None,
            ENTROPY=d_entropies is not None,
            num_warps=4,
        )
        return out


def power(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()
