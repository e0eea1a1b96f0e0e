"""Sums and fingerprints of a decoder's weights as they are served (I1).

    trainer   own = Contents.of(decoder, dtype), announced with the version; `checked` adds each tensor's sum to the stream
    engine    Contents.of(staged decoder) must equal the announcement; after the commit, so must the words in use

The trainer computes `own` from its parameters, never from the stream, so that a mistake on the way (a tensor left out,
two exchanged, a transposed view, a stale copy) cannot be in both. The fingerprint depends on every element and its
place; the sum of words runs at memory speed and serves for the second check.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tidemill.core.errors import PolicyMismatch
from tidemill.models.adapter_config import ADAPTER_CONFIG
from tidemill.models.decoder import Decoder
from tidemill.models.fingerprint import WORD, Fingerprint, identity, totals, word_bits, word_sum
from tidemill.models.hf_weights import hf_views
from tidemill.models.piecewise import Work, at_once, by_rows
from tidemill.models.quantised_base import base_numbers
from tidemill.models.weight_slices import Slice

HEAD = "the head, which is the embedding"
_ADAPTER = ".adapter."  # in the names of an adapter's parameters


AddUp = Callable[[Sequence[int]], list[int]]
"""Sums of each number over all processes that hold a part of the weights, modulo 2^64."""


@dataclass(frozen=True, slots=True)
class Contents:
    """Fingerprint, sums and shapes of a decoder's weights in the served dtype, by Hugging Face name."""

    fingerprint: str  # of all tensors
    totals: dict[str, int]  # of each tensor, see `Fingerprint.sums`
    words: dict[str, int]  # of each tensor, see `word_sum`
    outlines: dict[str, tuple[tuple[int, ...], torch.dtype]]

    @classmethod
    def of(cls, decoder: Decoder, dtype: torch.dtype) -> Contents:
        """The contents of a decoder. Raises PolicyMismatch if the names do not cover every parameter."""
        return at_once(cls.summing(decoder, dtype))

    @classmethod
    def summing(cls, decoder: Decoder, dtype: torch.dtype) -> Work[Contents]:
        """`of` in pieces, which are cast one by one."""
        blocks = (Slice.whole(name, view) for name, view in hf_views(decoder))
        return (yield from cls._summing(blocks, _numbers(decoder), dtype, list))

    @classmethod
    def of_blocks(cls, decoder: Decoder, blocks: Iterable[Slice], dtype: torch.dtype, add_up: AddUp) -> Contents:
        """The contents of a decoder that several processes hold, each of which gives some `blocks` of it.

        All of them must call this at the same time. Raises PolicyMismatch if the blocks of all are not all weights, once.
        """
        return at_once(cls._summing(blocks, _numbers(decoder), dtype, add_up))

    @classmethod
    def of_adapter(cls, decoder: Decoder, blocks: Iterable[Slice], add_up: AddUp) -> Contents:
        """The contents of a decoder's adapter, in its own dtypes; `blocks` as for `of_blocks`, with the configuration."""
        blocks = list(blocks)
        beside = sum(math.prod(block.shape) for block in blocks if block.name == ADAPTER_CONFIG)
        there = sum(p.numel() for name, p in decoder.named_parameters() if _ADAPTER in name)
        return at_once(cls._summing(blocks, there + beside, None, add_up))

    @classmethod
    def _summing(cls, blocks: Iterable[Slice], there: int, dtype: torch.dtype | None, add_up: AddUp) -> Work[Contents]:
        """dtype: to which every tensor is cast; None: its own."""
        everything, words, outlines = Fingerprint(), dict[str, list[int | Tensor]](), {}
        for block in blocks:
            of = dtype or block.tensor.dtype
            words[block.name], outlines[block.name] = [], (block.shape, of)
            if not block.tensor.numel():
                continue
            at = block.offset[0]
            for (rows,) in by_rows(block.tensor):
                piece = Slice(block.name, block.shape, (at, *block.offset[1:]), rows.to(of))
                words[block.name].append(everything.add(piece, words=True))
                at += len(rows)
                yield
        own, names = everything.partial(), list(outlines)
        mine = [own.get(name, (0, 0))[column] for column in range(2) for name in names]
        yield
        added = add_up([*mine, *totals(words).values()])
        columns = (added[i : i + len(names)] for i in range(0, len(added), len(names)))
        sums, elements, words_of_all = (dict(zip(names, column, strict=True)) for column in columns)
        for name, (shape, _) in outlines.items():
            if elements[name] != (total := math.prod(shape)):
                raise PolicyMismatch(f"{name}: {elements[name]} of its {total} elements were given")
        if (named := sum(elements.values())) != there:
            raise PolicyMismatch(f"the Hugging Face names cover {named} of {there} weights: the others would never be sent")
        return cls(identity(sums, outlines), dict(sorted(sums.items())), words_of_all, outlines)


def _numbers(decoder: Decoder) -> int:
    """The number of weights, without those of an adapter, which is served as a part of them."""
    return base_numbers(decoder) + sum(p.numel() for name, p in decoder.named_parameters() if _ADAPTER not in name)


def words_of(blocks: Iterable[Slice], add_up: AddUp = list) -> dict[str, int]:
    """Word sums by name in the blocks' own dtype, cheap enough for a second check."""
    found = {block.name: word_sum(block.tensor) for block in blocks}
    return dict(zip(found, add_up(list(found.values())), strict=True))


def words_by_matrix(decoder: Decoder, words: dict[str, int]) -> dict[str, int]:
    """The tensors' word sums, added up by parameter; keys name all its tensors."""
    found = {}
    for key, parameter, rows in _matrices(decoder):
        split = any(view.nbytes % WORD for _, view in rows[:-1])  # a word lies in two of them
        found[key] = word_sum(parameter) if split else sum(words[name] for name, _ in rows) % 2**64
    return found | {HEAD: found[next(iter(found))]} if decoder.head is None else found


def words_in_use(decoder: Decoder) -> Work[dict[str, int]]:
    """Word sums of what is computed with (packed copies too), as `words_by_matrix`."""
    packed = {id(weight): copy for _, weight, copy in decoder.packed()}
    found = dict[str, list[int | Tensor]]()
    for key, parameter, _ in _matrices(decoder):
        copy = packed.get(id(parameter)) if parameter is not decoder.embed.weight else None
        found[key] = yield from _word_bits(parameter if copy is None or copy.numbers is None else copy.numbers)
    if decoder.head is None:
        head = decoder.packed_head.numbers
        found[HEAD] = found[next(iter(found))] if head is None else (yield from _word_bits(head))
    return totals(found)


def _word_bits(tensor: Tensor) -> Work[list[int | Tensor]]:
    """The word sums of a tensor's pieces."""
    parts = []
    for (rows,) in by_rows(tensor):
        parts.append(word_bits(rows))
        yield
    return parts


def _matrices(decoder: Decoder) -> Iterator[tuple[str, Tensor, list[tuple[str, Tensor]]]]:
    """(names of all tensors that are rows of a parameter, the parameter, those tensors)."""
    rows: dict[int, list[tuple[str, Tensor]]] = {}
    for name, view in hf_views(decoder):
        rows.setdefault(view.untyped_storage().data_ptr(), []).append((name, view))
    for parameter in decoder.parameters():
        parts = rows[parameter.untyped_storage().data_ptr()]
        yield ", ".join(name for name, _ in parts), parameter, parts


def checked(stream: Iterable[Slice], own: Contents, blocks: Iterable[Slice] | None = None) -> Iterator[Slice]:
    """The slices of `stream`, each with its tensor's `total`, by which receivers verify it.

    blocks: those that this process sends; None: every tensor, whole. Raises PolicyMismatch that names the first tensor that
    does not belong to `own`, has another form, comes twice, or is missing; nothing of a stream that ends so may become
    visible.
    """
    places = {name: ((0,) * len(shape), shape) for name, (shape, _) in own.outlines.items()}
    if blocks is not None:
        places = {each.name: (each.offset, tuple(each.tensor.shape)) for each in blocks}
    left = set(places)
    for piece in stream:
        if piece.name not in left:
            known = "comes a second time" if piece.name in places else "is no weight of this model"
            raise PolicyMismatch(f"the weights that were about to be sent are not the trainer's: {piece.name} {known}")
        left.discard(piece.name)
        found, dtype = (piece.offset, tuple(piece.tensor.shape)), own.outlines[piece.name][1]
        if (*found, piece.tensor.dtype) != (*places[piece.name], dtype):
            raise PolicyMismatch(
                f"the weights that were about to be sent are not the trainer's: {piece.name} is "
                f"{_form(*found, piece.tensor.dtype)}, the trainer's is {_form(*places[piece.name], dtype)}"
            )
        yield replace(piece, total=own.totals[piece.name])
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise PolicyMismatch(f"the weights that were about to be sent are not all: {min(left)}{more} left out")


def _form(offset: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{list(shape)} {dtype}" + (f" at {list(offset)}" if any(offset) else "")
