"""What a decoder's weights come to when they are served, tensor by tensor: both ends of one proof (I1).

    trainer   own = Contents.of(decoder, dtype), announced with the version; `checked` holds the stream against it
    engine    Contents.of(staged decoder) must be what was announced; after the commit, the words of what runs must be those

The trainer reads `own` from its parameters, never from the stream, so that a mistake on the way (a tensor left out, two
exchanged, a transposed view, a stale copy) cannot be in both. The fingerprint is one-to-one in every element and knows its
place; the sum of words runs at memory speed, and is for what is looked at a second time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from tidemill.models.decoder import Decoder
from tidemill.models.fingerprint import Fingerprint, word_sum
from tidemill.models.slices import Slice
from tidemill.models.weights import hf_views
from tidemill.protocols import PolicyMismatch


@dataclass(frozen=True, slots=True)
class Contents:
    """A decoder's weights in the dtype that is served, by Hugging Face name."""

    fingerprint: str  # of all of them
    totals: dict[str, int]  # of each, see `Fingerprint.sums`
    words: dict[str, int]  # of each, see `word_sum`
    outlines: dict[str, tuple[tuple[int, ...], torch.dtype]]

    @classmethod
    def of(cls, decoder: Decoder, dtype: torch.dtype) -> Contents:
        """Cast one tensor at a time. Raises PolicyMismatch when the names do not cover every parameter."""
        everything, words, outlines = Fingerprint(), {}, {}
        for name, view in hf_views(decoder):
            piece = Slice.whole(name, view.to(dtype))
            everything.add(piece)
            words[name], outlines[name] = word_sum(piece.tensor), (piece.shape, dtype)
        _check_complete(decoder)
        return cls(everything.hexdigest(), everything.sums(), words, outlines)


def words_of(decoder: Decoder) -> dict[str, int]:
    """`Contents.words` in the decoder's own dtype: what is cheap enough to be looked at again."""
    return {name: word_sum(view) for name, view in hf_views(decoder)}


def checked(stream: Iterable[Slice], own: Contents, before: Contents | None = None) -> Iterator[Slice]:
    """The slices of `stream`, each with its tensor's `total`, as long as they are what `own` says.

    Raises PolicyMismatch that names the first tensor that is another one, or comes twice, or not at all; nothing of a
    stream that ends so may become visible. `before`: what was served until now, to say when a tensor is still that one.
    Tensors come whole.
    """
    left = dict(own.words)
    for piece in stream:
        if piece.name not in left:
            known = "comes a second time" if piece.name in own.words else "is no weight of this model"
            raise PolicyMismatch(f"the weights that were about to be sent are not the trainer's: {piece.name} {known}")
        words, outline = word_sum(piece.tensor), (tuple(piece.tensor.shape), piece.tensor.dtype)
        if words != left.pop(piece.name) or outline != own.outlines[piece.name]:
            stale = before is not None and before.words.get(piece.name) == words
            raise PolicyMismatch(
                f"the weights that were about to be sent are not the trainer's: {piece.name} "
                + ("is still that of the version before" if stale else "differs")
            )
        yield replace(piece, total=own.totals[piece.name])
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise PolicyMismatch(f"the weights that were about to be sent are not all: {next(iter(left))}{more} left out")


def _check_complete(decoder: Decoder) -> None:
    named = sum(view.numel() for _, view in hf_views(decoder))
    if named != (there := sum(p.numel() for p in decoder.parameters())):
        raise PolicyMismatch(f"the Hugging Face names cover {named} of {there} weights: the others would never be sent")
