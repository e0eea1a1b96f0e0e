"""Packed micro-batches within a token budget, in which shared prefixes of rows are run once.

    Sample -> BatchRow (what is predicted) -> split (which rows run together) -> pack -> Batch (tensors)

Rows are sorted by their tokens, so that each shares its prefix with the row before it, mostly a prompt or earlier turns. The
rows of one attempt stay together, because a loss may sum over all of them. Which attempts share a micro-batch, and which
tokens are run once, affects only speed and memory (I6): a token with the same prefix has the same hidden states in every
row, and its gradient is the sum over these rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from tidemill.algorithms.losses import LossInput
from tidemill.core.sampling_support import Support, joined_support
from tidemill.core.token_extras import expect_aligned
from tidemill.core.types import Array, Sample
from tidemill.models.adapter_dropout import prefix_hashes
from tidemill.models.kernels.cpu.packed_sequences import Families
from tidemill.models.logprobs import KeptIds

WORTH_CHOOSING = 0.98  # if a larger share of packed tokens predicts something, selecting them costs what it saves
_WORTH = 0.1  # if a smaller share of a row is common, sharing it costs more than it saves


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One sample with something to predict, as a row of a micro-batch."""

    index: int  # index of the sample in the list that was given
    sample: Sample
    where: Array  # [m] int64, m >= 1: positions that are predicted, because they were sampled or have a weight
    shared: int = 0  # length of the prefix that it shares with the row before it in its micro-batch

    @property
    def length(self) -> int:
        """The number of tokens that are run: the last predicted one is only a target."""
        return int(self.where[-1])

    @property
    def attempt(self) -> tuple[int, int]:
        """Equal for the rows of one attempt; a row that names no group is an attempt of its own."""
        sample = self.sample
        return (sample.group, sample.attempt) if sample.group >= 0 else (-1, self.index)


Unit = Sequence[BatchRow]
"""Rows that are not parted."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch: B rows of some attempts, N packed tokens (shared ones once), M predicted tokens."""

    rows: list[BatchRow]  # [B]
    tokens: Tensor  # [N] int64
    positions: Tensor  # [N] int64
    families: Families  # which tokens belong to which rows
    wanted: Tensor | None  # [P] int64: the packed tokens whose hidden states predict something; None: all N
    predictors: Tensor  # [M] int64: index of the P (or N) that predicts the target
    targets: Tensor  # [M] int64
    temperature: Tensor  # [M] float64
    weights: Tensor  # [M]
    inputs: dict[str, Tensor]  # [M] each: behaviour, old, advantages; reference, lag, old_values, returns if there are any
    extras: dict[str, Tensor]  # [M, *shape] each
    support: KeptIds | None  # ids that truncation and grammars kept
    sequence: Tensor  # [M] int64: the attempt of each, 0 .. attempts - 1
    attempts: int
    losses: dict[str, Tensor | None]  # loss id -> [M] bool mask of its tokens; None: all of them

    def loss_input(
        self, name: str, logprobs: Tensor, entropy: Tensor, values: Tensor | None = None
    ) -> tuple[LossInput, Tensor]:
        """The input and weights of the loss `name`, with only its tokens of the M."""
        given = {key: value.to(logprobs.dtype) if value.is_floating_point() else value for key, value in self.inputs.items()}
        live = {"entropy": entropy, "values": values}
        rows = {"sequence": self.sequence, "sequences": self.attempts, "extras": self.extras}
        x = LossInput(logprobs, **given, **live, **rows)
        own, weights = self.losses[name], self.weights.to(logprobs.dtype)
        return (x, weights) if own is None else (x.select(own), weights[own])


def rows_of(samples: Sequence[Sample]) -> list[BatchRow]:
    """The rows that predict something.

    Raises ValueError if one would predict its first token, or for token extras that are not aligned or not the same in all.
    """
    for s in samples:
        expect_aligned(s.extras, len(s.tokens), f"a sample of group {s.group}")
        if s.extras.keys() != samples[0].extras.keys():
            raise ValueError(
                f"groups {samples[0].group} and {s.group} have the token extras {[*samples[0].extras]} and {[*s.extras]}: "
                "the groups of a step must have been sampled for the same losses; give another run_dir"
            )
    rows = [BatchRow(i, s, np.flatnonzero(s.predicted)) for i, s in enumerate(samples)]
    rows = [row for row in rows if row.where.size]
    if any(row.where[0] == 0 for row in rows):
        raise ValueError("a sample's first token is sampled or has a weight: nothing predicts it, put a prompt before it")
    return rows


def by_attempt(rows: Iterable[BatchRow]) -> list[Unit]:
    """The rows of each attempt."""
    units = dict[tuple[int, int], list[BatchRow]]()
    for row in rows:
        units.setdefault(row.attempt, []).append(row)
    return list(units.values())


def split(units: Iterable[Unit], budget: int) -> list[list[BatchRow]]:
    """Split units into micro-batches of at most `budget` tokens; a longer unit is one of its own.

    Shared tokens count once. There are as few micro-batches as the sorted order allows, and the largest is as small as that
    number allows.
    """
    ordered = sorted((sorted(unit, key=_tokens) for unit in units), key=lambda unit: _tokens(unit[0]))
    rows = [row for unit in ordered for row in unit]
    firsts = [0, *accumulate(map(len, ordered))]  # the first row of each unit, and the end
    common = [0] * bool(rows) + [_common(a, b) for a, b in pairwise(rows)]
    added = [sum(rows[i].length - common[i] for i in range(a, b)) for a, b in pairwise(firsts)]
    alone = [tokens + common[first] for tokens, first in zip(added, firsts, strict=False)]
    starts = _starts(alone, added, budget)
    enough, low = budget, budget // 2
    while enough - low > 1:
        middle = (low + enough) // 2
        if len(found := _starts(alone, added, middle)) > len(starts):
            low = middle
        else:
            starts, enough = found, middle
    return [
        [replace(row, shared=common[i] if i > begin else 0) for i, row in enumerate(rows[begin:end], begin)]
        for begin, end in pairwise([*(firsts[i] for i in starts), len(rows)])
    ]


def _starts(alone: Sequence[int], added: Sequence[int], budget: int) -> list[int]:
    """The units that begin micro-batches, by their tokens `alone` and those `added`."""
    starts, used = [], budget
    for i, (whole, more) in enumerate(zip(alone, added, strict=True)):
        used += more
        if used > budget:
            starts.append(i)
            used = whole
    return starts


def _tokens(row: BatchRow) -> bytes:
    return row.sample.tokens[: row.length].tobytes()


def _common(a: BatchRow, b: BatchRow) -> int:
    """Length of the common prefix of the tokens that are run; 0 if it is too short a part of `b`."""
    n = min(a.length, b.length)
    differing = a.sample.tokens[:n] != b.sample.tokens[:n]
    shared = int(differing.argmax()) if differing.any() else n
    return shared if shared >= _WORTH * b.length else 0


def pack(rows: list[BatchRow], device: torch.device, *, up_to: int = 0) -> Batch:
    """Pack rows, in the order of `split`, into the tensors of one micro-batch.

    up_to: pad with unused tokens to the next of few sizes, but to no more than `up_to` tokens.
    """
    lengths, shared = [row.length for row in rows], [row.shared for row in rows]
    spare = _filling(sum(lengths) - sum(shared), max(lengths), up_to)
    families = Families.of(lengths + spare, shared + [0] * len(spare))
    pieces = [(row.sample.tokens[row.shared : row.length], np.arange(row.shared, row.length)) for row in rows]
    pieces += [(np.zeros(length, np.int32), np.arange(length)) for length in spare]
    counts = [len(row.where) for row in rows]
    numbers = dict[tuple[int, int], int]()
    sequence = [numbers.setdefault(row.attempt, len(numbers)) for row in rows]
    places = np.concatenate([families.of_sequence(i)[row.where - 1] for i, row in enumerate(rows)])
    wanted, predictors = np.unique(places, return_inverse=True)
    fewer = len(wanted) < WORTH_CHOOSING * families.tokens
    more = filled(len(wanted), up_to) - len(wanted)  # padding, which predicts nothing

    def send(array: Array) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    def gather(field: Callable[[Sample], Array]) -> Tensor:
        return send(np.concatenate([field(row.sample)[row.where] for row in rows]))

    def old(sample: Sample) -> Array:
        return sample.logprobs if sample.old_logprobs is None else sample.old_logprobs

    inputs = {"behaviour": gather(lambda s: s.logprobs), "old": gather(old), "advantages": gather(lambda s: s.advantages)}
    known = {"reference": "ref_logprobs", "old_values": "values", "returns": "returns", "lag": "lags"}
    for name, field in known.items():
        if any(getattr(row.sample, field) is not None for row in rows):
            values = gather(partial(_known, field=field))
            inputs[name] = values.long() if name == "lag" else values
    return Batch(
        rows=rows,
        tokens=send(np.concatenate([tokens for tokens, _ in pieces]).astype(np.int64)),
        positions=send(np.concatenate([positions for _, positions in pieces])),
        families=families,
        wanted=send(np.append(wanted, np.repeat(wanted[:1], more))) if fewer else None,
        predictors=send(predictors if fewer else places),
        targets=gather(lambda s: s.tokens).long(),
        temperature=send(np.repeat(np.array([row.sample.temperature for row in rows]), counts)),
        weights=gather(lambda s: s.weights),
        inputs=inputs,
        extras={name: gather(lambda s, name=name: s.extras[name]) for name in rows[0].sample.extras},
        support=_support(rows, counts, send),
        sequence=send(np.repeat(np.array(sequence), counts)),
        attempts=len(numbers),
        losses=_by_loss([row.sample.loss for row in rows], counts, send),
    )


def prefixes(batch: Batch) -> Tensor:
    """[N] int64: of each packed token a hash of its row's tokens up to it, 0 of padding."""
    own = [prefix_hashes(row.sample.tokens[: row.length])[row.shared :] for row in batch.rows]
    spare = torch.zeros(batch.families.tokens - sum(map(len, own)), dtype=torch.int64)
    return torch.cat([*own, spare]).to(batch.tokens.device)


def filled(tokens: int, up_to: int) -> int:
    """The next larger of 32 sizes per octave, at most `up_to`; `tokens` itself if it is larger."""
    return tokens + max(0, min(-tokens % (1 << max(0, tokens.bit_length() - 6)), up_to - tokens))


def _filling(tokens: int, longest: int, up_to: int) -> list[int]:
    """Lengths, each at most `longest`, of the padding rows up to the size `filled`."""
    lacking = filled(tokens, up_to) - tokens
    return [longest] * (lacking // longest) + [lacking % longest] * (lacking % longest > 0)


def _by_loss(names: list[str], counts: list[int], send: Callable[[Array], Tensor]) -> dict[str, Tensor | None]:
    distinct = sorted(set(names))
    if len(distinct) == 1:
        return {distinct[0]: None}
    own = np.repeat(np.array([distinct.index(n) for n in names]), counts)
    return {name: send(own == i) for i, name in enumerate(distinct)}


def _known(sample: Sample, field: str) -> Array:
    """A sample's optional field; else lags of 0, or NaN, which no loss survives."""
    values = getattr(sample, field)
    return np.full(sample.tokens.shape, np.int32(0) if field == "lags" else np.float32(np.nan)) if values is None else values


def _support(rows: list[BatchRow], counts: list[int], send: Callable[[Array], Tensor]) -> KeptIds | None:
    """The ids that tokens were sampled from, among the predicted tokens; None if all had the whole vocabulary."""
    of, parts, begin = list[Array](), list[tuple[Support, int]](), 0
    for row, count in zip(rows, counts, strict=True):
        if (support := row.sample.support) is not None:
            sampled = np.flatnonzero(row.sample.mask[row.where])  # among the predicted tokens
            of.append(begin + sampled)
            parts.append((support, len(sampled)))
        begin += count
    if (support := joined_support(parts)) is None:
        return None
    places, sets = np.concatenate(of).astype(np.int64), support.set_of_each.astype(np.int64)
    ids, offsets = support.ids.astype(np.int64), support.offsets.astype(np.int64)
    return KeptIds(send(places), send(sets), send(ids), send(offsets), send(support.lacking))
