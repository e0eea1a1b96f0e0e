"""What a decoder's weights come to when they are served, tensor by tensor: both ends of one proof (I1).

    trainer   own = Contents.of(decoder, dtype), announced with the version; `checked` says with each tensor what it sums to
    engine    Contents.of(staged decoder) must be what was announced; after the commit, the words of what runs must be those

The trainer reads `own` from its parameters, never from the stream, so that a mistake on the way (a tensor left out, two
exchanged, a transposed view, a stale copy) cannot be in both. Only the engine's look at what it will serve is a proof: the
stream is not summed on its way as well. The fingerprint is one-to-one in every element and knows its place; the sum of words
runs at memory speed, and is for what is looked at a second time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tidemill.core.interfaces import PolicyMismatch
from tidemill.models.decoder import Decoder
from tidemill.models.fingerprint import WORD, Fingerprint, totals, word_bits, word_sum
from tidemill.models.hf_weights import hf_views
from tidemill.models.piecewise import Work, at_once, by_rows
from tidemill.models.weight_slices import Slice

HEAD = "the head, which is the embedding"


@dataclass(frozen=True, slots=True)
class Contents:
    """A decoder's weights in the dtype that is served, by Hugging Face name."""

    fingerprint: str  # of all of them
    totals: dict[str, int]  # of each, see `Fingerprint.sums`
    words: dict[str, int]  # of each, see `word_sum`
    outlines: dict[str, tuple[tuple[int, ...], torch.dtype]]

    @classmethod
    def of(cls, decoder: Decoder, dtype: torch.dtype) -> Contents:
        """Raises PolicyMismatch when the names do not cover every parameter."""
        return at_once(cls.summing(decoder, dtype))

    @classmethod
    def summing(cls, decoder: Decoder, dtype: torch.dtype) -> Work[Contents]:
        """`of`, in pieces, cast one by one."""
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
    """`Contents.words` in the decoder's own dtype: what is cheap enough to be looked at again."""
    return {name: word_sum(view) for name, view in hf_views(decoder)}


def words_by_matrix(decoder: Decoder, words: dict[str, int]) -> dict[str, int]:
    """`words` of the tensors, added up for those that are rows of one parameter, under all their names."""
    found = {}
    for key, parameter, rows in _matrices(decoder):
        split = any(view.nbytes % WORD for _, view in rows[:-1])  # a word has its ends in two of them
        found[key] = word_sum(parameter) if split else sum(words[name] for name, _ in rows) % 2**64
    return found | {HEAD: found[next(iter(found))]} if decoder.head is None else found


def words_in_use(decoder: Decoder) -> Work[dict[str, int]]:
    """The same of what is computed with: of a matrix that is packed, its packed copy's words, which are the same ones."""
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
    """Of its pieces."""
    parts = []
    for (rows,) in by_rows(tensor):
        parts.append(word_bits(rows))
        yield
    return parts


def _matrices(decoder: Decoder) -> Iterator[tuple[str, Tensor, list[tuple[str, Tensor]]]]:
    """Every parameter, under the names of all the tensors that are its rows, and these."""
    rows: dict[int, list[tuple[str, Tensor]]] = {}
    for name, view in hf_views(decoder):
        rows.setdefault(view.untyped_storage().data_ptr(), []).append((name, view))
    for parameter in decoder.parameters():
        parts = rows[parameter.untyped_storage().data_ptr()]
        yield ", ".join(name for name, _ in parts), parameter, parts


def checked(stream: Iterable[Slice], own: Contents) -> Iterator[Slice]:
    """The slices of `stream`, each with its tensor's `total` for the receivers, who prove by it what they received.

    Raises PolicyMismatch that names the first tensor that does not belong to `own`, has another form, comes twice, or not at
    all; nothing of a stream that ends so may become visible. Tensors come whole.
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
