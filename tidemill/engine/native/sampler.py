"""Sampler: logits to tokens, with the exact logprob of each choice.

Rows of one batch may have different parameters. Noise is one uniform number per (seed, position), from a counter-based hash:
neither batching, preemption nor the order of arrival can change it. The token is where the cumulative probability first
exceeds it (inverse CDF, accumulated in float64 over blocks, then inside one block), so a token of probability zero is never
chosen.

`logprobs` belong to the distribution that was sampled: adjusted logits, of the ids that a grammar allows, temperature, then
top-k, then top-p on what top-k kept, and min-p, renormalised. `model_logprobs` belong to the unmodified model. A greedy
choice is certain: its logprob is 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from tidemill.core.types import SamplingParams
from tidemill.models.kernels.cpu.bindings import Native
from tidemill.models.kernels.cuda.launchers import Gpu

BLOCK = 256  # tokens of the vocabulary in one block of the two-level search
NEVER = -1e9  # a logit of probability 0; finite, so that a row of such logits is still a distribution
CANDIDATES = 256  # a truncated row's tokens are first searched among this many likeliest ones
_STEP, _FIRST, _SECOND = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)


@dataclass(frozen=True, slots=True)
class Adjustment:
    """The changes of one row of a step to its logits before sampling.

    They apply in this order: the repetition penalty of Keskar et al. (2019) on the model's own logits, the frequency and
    presence penalties of OpenAI's interface, the bias, and `min_tokens`.
    """

    params: SamplingParams
    ends: tuple[int, ...]  # ids that end the reply
    prompt: np.ndarray  # [P] token ids
    reply: np.ndarray  # [n] token ids sampled so far

    def apply(self, logits: Tensor) -> None:
        """Change `logits` [V] float32 in place."""
        asked, device = self.params, logits.device
        if asked.repetition_penalty != 1:
            seen = _indices(np.union1d(self.prompt, self.reply), device)
            own = logits[seen]
            logits[seen] = torch.where(own > 0, own / asked.repetition_penalty, own * asked.repetition_penalty)
        if asked.frequency_penalty or asked.presence_penalty:
            ids, counts = np.unique(self.reply, return_counts=True)
            taken = asked.frequency_penalty * counts + asked.presence_penalty
            logits[_indices(ids, device)] -= torch.from_numpy(taken).to(device, logits.dtype)
        if asked.logit_bias:
            ids, added = zip(*asked.logit_bias, strict=True)
            logits[_indices(np.array(ids), device)] += torch.tensor(added, dtype=logits.dtype, device=device)
        if len(self.reply) < asked.min_tokens and self.ends:
            logits[_indices(np.array(self.ends), device)] = NEVER


@dataclass(slots=True)
class RowParams:
    """Sampling parameters of R rows."""

    temperature: np.ndarray  # [R] float64
    top_p: np.ndarray  # [R] float64
    top_k: np.ndarray  # [R] int64, 0 is off
    min_p: np.ndarray  # [R] float64
    uniform: np.ndarray  # [R] float64 in [0, 1), see `uniforms`
    adjustments: dict[int, Adjustment] = field(default_factory=dict)  # by row
    masks: dict[int, np.ndarray] = field(
        default_factory=dict
    )  # by row, [V] bool: the ids that a grammar allows, at least one

    @property
    def truncated(self) -> np.ndarray:
        """True, [R] bool, for rows that do not sample from the whole vocabulary."""
        return (self.temperature != 0) & ((self.top_p < 1) | (self.top_k > 0) | (self.min_p > 0))


@dataclass(slots=True)
class Sampled:
    """Sampled tokens of R rows, with their logprobs."""

    tokens: np.ndarray  # [R] int64
    logprobs: np.ndarray  # [R] float32
    model_logprobs: np.ndarray  # [R] float32
    supports: dict[int, np.ndarray] = field(default_factory=dict)  # truncated row -> kept ids, int32, likeliest first


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Uniform numbers [R] float64 in [0, 1) from `mixed` seeds [R] and token positions [R].

    It is splitmix64 (Steele et al. 2014).
    """
    counter = (positions.astype(np.uint64) + np.uint64(1)) * _STEP
    return (mixed(seeds + counter) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def mixed(z: np.ndarray) -> np.ndarray:
    """Hash of [R] uint64 that leaves nothing common between neighbours."""
    z = (z ^ (z >> np.uint64(30))) * _FIRST
    z = (z ^ (z >> np.uint64(27))) * _SECOND
    return z ^ (z >> np.uint64(31))


def sample(logits: Tensor, ask: RowParams, compiled: Native | Gpu | None = None) -> Sampled:
    """Sample one token for each row of `logits` [R, V] float32.

    Raises FloatingPointError when logits are not finite. compiled: kernels that may be used; their results differ in the
    last place.
    """
    if ask.adjustments or ask.masks:
        return _sample_adjusted(logits, ask)
    truncated = ask.truncated
    if not truncated.any() and compiled is not None:
        return finite(Sampled(*compiled.sample(logits, ask.temperature, ask.uniform)))
    greedy = ask.temperature == 0
    uniform = _column(ask.uniform, logits.device)
    model = logprobs = torch.log_softmax(logits, dim=-1)  # enough at temperature 1 without truncation
    if tempered := bool((ask.temperature != 1).any()):
        temperature = _column(np.where(greedy, 1.0, ask.temperature), logits.device)
        logprobs = torch.log_softmax(logits / temperature.float(), dim=-1)
    tokens = draw(logprobs.exp(), uniform)
    chosen = logprobs.gather(1, tokens)
    supports: dict[int, np.ndarray] = {}
    if greedy.any():
        rows = _rows(greedy, logits.device)
        tokens[rows] = logits[rows].argmax(dim=-1, keepdim=True)
        chosen[rows] = 0.0
    if truncated.any():
        rows = _rows(truncated, logits.device)
        ids, kept = truncate(logprobs[rows], ask.top_k[truncated], ask.top_p[truncated], ask.min_p[truncated])
        kept = kept - kept.logsumexp(dim=-1, keepdim=True)
        at = draw(kept.exp(), uniform[rows])
        tokens[rows], chosen[rows] = ids.gather(1, at), kept.gather(1, at)
        sizes = (kept > -torch.inf).sum(dim=-1).tolist()
        lists = ids.to(torch.int32).cpu().numpy()
        supports = {int(r): lists[i, : sizes[i]].copy() for i, r in enumerate(np.flatnonzero(truncated))}
    of_model = model.gather(1, tokens) if tempered or truncated.any() else chosen
    return finite(Sampled(_flat(tokens), _flat(chosen), _flat(of_model), supports))


def _sample_adjusted(logits: Tensor, ask: RowParams) -> Sampled:
    """Sample after applying adjustments and masks. `model_logprobs` stay the unmodified model's."""
    rows, own = [*(ask.adjustments | ask.masks)], logits
    logits = logits.clone()
    for row, adjustment in ask.adjustments.items():
        adjustment.apply(logits[row])
    if ask.masks:
        masked, kept = [*ask.masks], torch.from_numpy(np.stack([*ask.masks.values()])).to(own.device)
        logits[masked] = logits[masked].masked_fill(~kept, -torch.inf)
    result = sample(logits, replace(ask, adjustments={}, masks={}))
    tokens = torch.from_numpy(result.tokens[rows])[:, None].to(own.device)
    result.model_logprobs = result.model_logprobs.copy()  # they may be the same array as the logprobs
    result.model_logprobs[rows] = _flat(torch.log_softmax(own[rows], dim=-1).gather(1, tokens))
    return finite(result)


def finite(result: Sampled) -> Sampled:
    """Return `result`. Raises FloatingPointError when its logits were not finite."""
    if not (np.isfinite(result.logprobs).all() and np.isfinite(result.model_logprobs).all()):
        raise FloatingPointError("the model's logits are not finite: the weights hold NaN or infinite values, or overflowed")
    return result


def draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """The first index whose cumulative probability exceeds a share of the total: [R, 1] int64.

    probabilities: [R, W]; they need not sum to one exactly. uniform: the share, [R, 1].
    """
    rows, width = probabilities.shape
    if width > 2 * BLOCK:
        size = next((n for n in (BLOCK, BLOCK // 2, BLOCK // 4) if width % n == 0), BLOCK)
        if width % size:
            probabilities = torch.nn.functional.pad(probabilities, (0, -width % size))
        blocks = probabilities.view(rows, probabilities.shape[1] // size, size)  # perhaps 0 rows
        block, rest = _search(blocks.sum(dim=-1).double(), uniform, scale=True)
        inside = blocks.gather(1, block[:, :, None].expand(-1, -1, size)).squeeze(1).double()
        return block * size + _search(inside, rest, scale=False)[0]
    return _search(probabilities.double(), uniform, scale=True)[0]


def _search(weights: Tensor, target: Tensor, *, scale: bool) -> tuple[Tensor, Tensor]:
    """Index [R, 1] and the rest of the target inside it. scale: the target is a share of the sum."""
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:]
    target = target * total if scale else target
    # Rounding can push the target to the total or past it: then take the last step of the cumulative sum.
    index = torch.minimum((cumulative <= target).sum(-1, keepdim=True), (cumulative < total).sum(-1, keepdim=True))
    return index, target - (cumulative.gather(1, index) - weights.gather(1, index))


def truncate(logprobs: Tensor, top_k: np.ndarray, top_p: np.ndarray, min_p: np.ndarray) -> tuple[Tensor, Tensor]:
    """Apply top-k, top-p and min-p to normalised `logprobs` [R, V].

    Returns (ids [R, W] likeliest first, their logprobs with -inf where not kept).
    """
    vocab = logprobs.shape[1]
    k = _column(np.where(top_k > 0, np.minimum(top_k, vocab), vocab), logprobs.device)
    p, ratio = _column(top_p, logprobs.device), _column(min_p, logprobs.device)
    width = CANDIDATES
    while True:
        width = min(width, vocab)
        values, ids = (
            torch.topk(logprobs, width, dim=-1) if width < vocab else logprobs.sort(dim=-1, descending=True, stable=True)
        )
        mass = values.double().exp()
        ranked = torch.arange(width, device=logprobs.device) < k
        # Without top-k the row's whole mass is 1 even if only its head is computed here.
        total = torch.where(k < vocab, torch.where(ranked, mass, 0.0).sum(-1, keepdim=True), torch.ones_like(p))
        before = mass.cumsum(dim=-1) - mass
        keep = ranked & ((p >= 1) | (before < p * total)) & (mass >= ratio * mass[:, :1])
        keep[:, 0] = True
        # The last candidate is kept: more may follow it. (Keeping is downward closed, every test is monotone.)
        if width == vocab or not bool((keep[:, -1:] & (k > width)).any() or ((k > width) & (k < vocab)).any()):
            return ids, torch.where(keep, values, -torch.inf)
        width = vocab


def alternatives(logprobs: Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The likeliest tokens: (ids [R, count] int32, logprobs [R, count] float32), likeliest first."""
    values, ids = torch.topk(logprobs, min(count, logprobs.shape[1]), dim=-1)
    return ids.to(torch.int32).cpu().numpy(), values.float().cpu().numpy()


def _column(values: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))[:, None].to(device)


def _rows(selected: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.flatnonzero(selected)).to(device)


def _flat(column: Tensor) -> np.ndarray:
    return column.squeeze(1).cpu().numpy()


def _indices(ids: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(ids.astype(np.int64)).to(device)
