"""Sums and fingerprints of a decoder's weights as they are served (I1).

    trainer   own = Contents.of(decoder, dtype), announced with the version; `checked` adds each tensor's sum to the stream
    engine    Contents.of(staged decoder) must equal the announcement; after the commit, so must the words in use

The trainer computes `own` from its parameters, never from the stream, so that a mistake on the way (a tensor left out,
two exchanged, a transposed view, a stale copy) cannot be in both. The fingerprint depends on every element and its
place; the sum of words runs at memory speed and serves for the second check.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tidemill.core.errors import PolicyMismatch
from tidemill.models.decoder import Decoder
from tidemill.models.fingerprint import WORD, Fingerprint, totals, word_bits, word_sum
from tidemill.models.hf_weights import hf_views
from tidemill.models.piecewise import Work, at_once, by_rows
from tidemill.models.weight_slices import Slice

HEAD = "the head, which is the embedding"


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
        everything, words, outlines, named = Fingerprint(), dict[str, list[int | Tensor]](), {}, 0
        for name, view in hf_views(decoder):
            shape, at = tuple(view.shape), 0
            words[name], outlines[name] = [], (shape, dtype)
            for (rows,) in by_rows(view):
                piece = Slice(name, shape, (at, *(0,) * (view.ndim - 1)), rows.to(dtype))
                words[name].append(everything.add(piece, words=True))
                at += len(rows)
                yield
            named += view.numel()
        if named != (there := sum(p.numel() for p in decoder.parameters())):
            raise PolicyMismatch(f"the Hugging Face names cover {named} of {there} weights: the others would never be sent")
        identity = everything.hexdigest()
        yield
        sums = everything.sums()
        yield
        return cls(identity, sums, totals(words), outlines)


def words_of(decoder: Decoder) -> dict[str, int]:
    """Word sums by name in the decoder's own dtype, cheap enough for a second check."""
    return {name: word_sum(view) for name, view in hf_views(decoder)}


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


def checked(stream: Iterable[Slice], own: Contents) -> Iterator[Slice]:
    """The slices of `stream`, each with its tensor's `total`, by which receivers verify it.

    Tensors come whole. Raises PolicyMismatch that names the first tensor that does not belong to `own`, has another
    form, comes twice, or is missing; nothing of a stream that ends so may become visible.
    """
    left = set(own.outlines)
    for piece in stream:
        if piece.name not in left:
            known = "comes a second time" if piece.name in own.outlines else "is no weight of this model"
            raise PolicyMismatch(f"the weights that were about to be sent are not the trainer's: {piece.name} {known}")
        left.discard(piece.name)
        if (outline := (tuple(piece.tensor.shape), piece.tensor.dtype)) != own.outlines[piece.name]:
            raise PolicyMismatch(
                f"the weights that were about to be sent are not the trainer's: {piece.name} is {_form(*outline)}, "
                f"the trainer's is {_form(*own.outlines[piece.name])}"
            )
        yield replace(piece, total=own.totals[piece.name])
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise PolicyMismatch(f"the weights that were about to be sent are not all: {min(left)}{more} left out")


def _form(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{list(shape)} {dtype}"
