"""Logprobs of given tokens from hidden states, without holding all logits at once.

With N tokens and a vocabulary of V, the logits alone are 4 N V bytes (32k tokens of a 150k vocabulary: 20 GB), and their
gradient takes as much again. Here a chunk of rows is projected, reduced and dropped; the backward pass projects it
again. Small problems take the plain path, which keeps the logits and projects once.

The head is computed in float32 (float64 for float64 weights), as in `Decoder.logits`. On a device that multiplies
bfloat16 into float32, its weights and inputs may be bfloat16, as in an engine there; logits and all sums are float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tidemill.models.decoder import Decoder
from tidemill.models.kernels.cuda.launchers import Gpu
from tidemill.models.kernels.library import gpu
from tidemill.models.trained_linear import NARROW, add_product, mixes, product


@dataclass(frozen=True, slots=True)
class KeptIds:
    """The ids that some of N rows are over, as sets that rows may share. Other rows are over the whole vocabulary."""

    rows: Tensor  # [K] int64, ascending
    sets: Tensor  # [K] int64: the set of each
    ids: Tensor  # [sum of the lists] int64
    offsets: Tensor  # [S + 1] int64: set s lists `ids[offsets[s]:offsets[s + 1]]`
    lacks: Tensor  # [S] bool: the set is all ids but those that it lists

    def left_out(self, begin: int, rows: int, vocab: int) -> Tensor | None:
        """[rows, V] bool: ids that the rows from `begin` on are not over; None if there are none."""
        device = self.rows.device
        low, high = torch.searchsorted(self.rows, torch.tensor([begin, begin + rows], device=device)).tolist()
        if low == high:
            return None
        sets, own = self.sets[low:high].unique(return_inverse=True)
        first, lengths = self.offsets[sets], self.offsets[sets + 1] - self.offsets[sets]
        of = torch.repeat_interleave(torch.arange(len(sets), device=device), lengths)
        behind = torch.arange(len(of), device=device) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
        lacks = self.lacks[sets]
        out = (~lacks)[:, None].repeat(1, vocab)
        out[of, self.ids[first[of] + behind]] = lacks[of]
        if high - low == rows:
            return out[own]
        result = torch.zeros((rows, vocab), dtype=torch.bool, device=device)
        result[self.rows[low:high] - begin] = out[own]
        return result


_PLAIN = 1 << 20  # logits up to which the plain path is taken: 4 MiB in float32
_CHUNK = {"cpu": 1 << 20}  # logits held at a time, about what the caches hold
_CHUNK_ELSEWHERE = 1 << 28  # a GiB: each chunk reads and writes the gradient of the whole head
_NEVER = -1e4  # a log of 0 that can be multiplied by 0
_ROWS = 256  # the fewest rows of a chunk: with fewer, reading the head's weights takes longer than multiplying by them


def token_logprobs(
    decoder: Decoder,
    hidden: Tensor,
    targets: Tensor,
    temperature: Tensor | float = 1.0,
    *,
    entropy: bool = False,
    support: KeptIds | None = None,
    chunk: int | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(log p(target) [N], entropy [N] or None) of softmax(logits / temperature), in nats.

    Both can be differentiated. hidden [N, D], targets [N] int64, temperature > 0: [N] or one for all (no gradient flows
    to it). support: the ids that rows have their distribution over, as truncation and grammars leave them. chunk: rows that
    are projected at a time; None chooses by memory, and takes the plain path for small problems. dtype: bfloat16 if the
    factors of products, and the logits' gradient, may be rounded to it on a device that can. Results are float32,
    float64 for float64 weights. Raises ValueError for a temperature that is not positive: greedy tokens have no logprob
    to train on.
    """
    if not isinstance(temperature, Tensor) and not temperature > 0:
        raise ValueError(
            f"temperature={temperature!r}: expected a value > 0, greedy sampling has no distribution to train on"
        )
    scale = torch.as_tensor(temperature, dtype=None if isinstance(temperature, Tensor) else torch.float64).detach()
    weight = decoder.head_weight
    wide = torch.promote_types(weight.dtype, torch.float32)
    rows, vocab = hidden.shape[0], weight.shape[0]
    with torch.autocast(hidden.device.type, enabled=False):
        hidden, weight = hidden.to(wide), weight.to(wide)
        scale = scale.to(hidden.device, wide).expand(rows)
        narrow = NARROW if dtype == NARROW and wide == torch.float32 and mixes(hidden) else None
        if chunk is None and rows * vocab <= _PLAIN and narrow is None:
            return _plain(hidden, weight, targets, scale, entropy, support)
        chunk = chunk or chunk_rows(vocab, hidden.device.type)
        logprobs, entropies = _Chunked.apply(hidden, weight, targets, scale, entropy, support, chunk, narrow)
        return logprobs, entropies if entropy else None


def chunk_rows(vocab: int, device: str) -> int:
    """The number of rows projected at a time by default."""
    return max(_ROWS, _CHUNK.get(device, _CHUNK_ELSEWHERE) // vocab)


def _plain(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor, entropy: bool, support: KeptIds | None
) -> tuple[Tensor, Tensor | None]:
    scaled = F.linear(hidden, weight) / temperature[:, None]  # [N, V]
    left_out = _left_out(support, 0, *scaled.shape)
    every = torch.log_softmax(scaled if left_out is None else scaled.masked_fill(left_out, -torch.inf), dim=-1)
    logprobs = every.gather(1, targets[:, None]).squeeze(1)
    if not entropy:
        return logprobs, None
    known = every if left_out is None else every.masked_fill(left_out, 0.0)  # 0 log 0
    return logprobs, -(every.exp() * known).sum(-1)


def _left_out(support: KeptIds | None, begin: int, rows: int, vocab: int) -> Tensor | None:
    return None if support is None else support.left_out(begin, rows, vocab)


class _Chunked(torch.autograd.Function):
    """Gradients: d logp_t / d z = onehot - p and d H / d z = -p (log p + H), z = logits / temperature."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: Tensor,
        entropy: bool,
        support: KeptIds | None,
        chunk: int,
        narrow: torch.dtype | None,
    ) -> tuple[Tensor, Tensor]:
        logprobs, totals = hidden.new_empty(hidden.shape[0]), hidden.new_empty(hidden.shape[0])
        entropies = hidden.new_empty(hidden.shape[0] if entropy else 0)
        if narrow is not None:
            hidden, weight = hidden.to(narrow), weight.to(narrow)
        for begin in range(0, hidden.shape[0], chunk):
            part = slice(begin, begin + chunk)
            logits = product(hidden[part], weight.T)
            left_out = _left_out(support, begin, *logits.shape)
            found = _summarised(logits, left_out, temperature[part].contiguous(), targets[part], entropy)
            totals[part], logprobs[part], of_rows = found
            if of_rows is not None:
                entropies[part] = of_rows
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, targets, temperature, totals, entropies)
        ctx.support, ctx.chunk = support, chunk
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, targets, temperature, totals, entropies = ctx.saved_tensors
        d_logprobs, d_entropies = grads
        wide = temperature.dtype
        d_hidden = torch.empty_like(hidden, dtype=wide) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        with torch.autocast(hidden.device.type, enabled=False):
            for begin in range(0, hidden.shape[0], ctx.chunk):
                part = slice(begin, begin + ctx.chunk)
                logits = product(hidden[part], weight.T)
                d_logits = _differentiated(
                    logits,
                    _left_out(ctx.support, begin, *logits.shape),
                    temperature[part].contiguous(),
                    targets[part],
                    totals[part],
                    entropies[part],
                    None if d_logprobs is None else d_logprobs[part].contiguous(),
                    None if d_entropies is None else d_entropies[part].contiguous(),
                    hidden.dtype,
                )
                if d_hidden is not None:
                    d_hidden[part] = product(d_logits, weight)
                if d_weight is not None:
                    add_product(d_weight, d_logits.T, hidden[part])
        return d_hidden, d_weight, None, None, None, None, None, None


def _summarised(
    logits: Tensor, left_out: Tensor | None, temperature: Tensor, targets: Tensor, entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(log sum exp, targets' logprobs, entropies or None) [n]; overwrites the logits."""
    if left_out is not None:
        logits.masked_fill_(left_out, -torch.inf)
    if (kernels := _kernels(logits)) is not None:
        return kernels.summarise(logits, temperature, targets, entropy)
    scaled = logits.div_(temperature[:, None])
    totals = scaled.logsumexp(-1)
    logprobs = scaled.gather(1, targets[:, None]).squeeze(1) - totals
    if not entropy:
        return totals, logprobs, None
    log_p = scaled.sub_(totals[:, None])
    if left_out is not None:
        log_p.masked_fill_(left_out, _NEVER)
    return totals, logprobs, -torch.linalg.vecdot(log_p.exp(), log_p)


def _differentiated(
    logits: Tensor,
    left_out: Tensor | None,
    temperature: Tensor,
    targets: Tensor,
    totals: Tensor,
    entropies: Tensor,
    d_logprobs: Tensor | None,
    d_entropies: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Gradient of the loss by the logits [n, V], which it overwrites, in `dtype`."""
    if (kernels := _kernels(logits)) is not None:
        if left_out is not None:
            logits.masked_fill_(left_out, -torch.inf)
        return kernels.differentiate(logits, temperature, targets, totals, entropies, d_logprobs, d_entropies, dtype)
    log_p = logits.div_(temperature[:, None]).sub_(totals[:, None])
    if left_out is not None:
        log_p.masked_fill_(left_out, _NEVER)
    p = log_p.exp()
    factor = 0.0 if d_logprobs is None else d_logprobs[:, None]
    if d_entropies is not None:
        d_logits = log_p.add_(entropies[:, None]).mul_(d_entropies[:, None]).add_(factor).mul_(p).neg_()
    else:
        d_logits = p.mul_(factor).neg_()
    if d_logprobs is not None:
        d_logits.scatter_add_(1, targets[:, None], d_logprobs[:, None])
    return d_logits.div_(temperature[:, None]).to(dtype)


def _kernels(logits: Tensor) -> Gpu | None:
    """Kernels that read logits once instead of a dozen times; None if there are none."""
    return gpu() if logits.is_cuda and logits.dtype == torch.float32 else None
