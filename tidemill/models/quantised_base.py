"""Decoders whose layers' matrices are held in few bits, to train an adapter on them (QLoRA, 2305.14314).

Embedding, head, norms and biases stay as they are. Of a quantised matrix `linear.weight` is a shape on the device "meta",
and no parameter: nothing shards, saves, trains or moves it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from tidemill.models.decoder import Decoder
from tidemill.models.hf_weights import hf_views, load_folder, load_scored, stacked_modules
from tidemill.models.quantised_linear import Base
from tidemill.models.quantised_weights import Quantised, of_base, quantise, quantised_slice, served_base
from tidemill.models.weight_slices import Slice


def load_quantised(folder: str | Path, kind: str) -> Decoder:
    """The model of a Hugging Face folder with a base of a kind, "float32" as `load_folder` loads it.

    Matrices are quantised one by one as they are read, so that the memory of wide ones is never taken. Raises
    UnsupportedModel as `load_folder` does.
    """
    if kind == "float32":
        return load_folder(folder)
    found = dict[str, Quantised]()
    decoder = load_folder(folder, through=partial(_narrowed, kind, found))
    hold(decoder, found)
    return decoder


def load_quantised_scored(folder: str | Path, kind: str) -> tuple[Decoder, Tensor | None]:
    """The decoder and the score of a folder for sequence classification, as `load_scored` and `load_quantised` load them."""
    if kind == "float32":
        return load_scored(folder)
    found = dict[str, Quantised]()
    decoder, score = load_scored(folder, through=partial(_narrowed, kind, found))
    hold(decoder, found)
    return decoder, score


def _narrowed(kind: str, found: dict[str, Quantised], decoder: Decoder, slices: Iterable[Slice]) -> Iterator[Slice]:
    """The slices of a folder; the layers' matrices among them are quantised into `found`."""
    there = dict(hf_views(decoder))
    for piece in slices:
        if of_base(piece.name) and piece.name in there and piece.shape == there[piece.name].shape:
            found[piece.name] = quantised_slice(replace(piece, tensor=piece.tensor.float()), kind)
            piece = replace(piece, tensor=there[piece.name])  # it counts as loaded; nothing is written
        yield piece


def load_served(folder: str | Path, kind: str, dtype: torch.dtype = torch.float32) -> Decoder:
    """A model of whole matrices in `dtype`, with the numbers of the base that `load_quantised` makes, rounded once."""
    if kind == "float32":
        return load_folder(folder, dtype)
    return load_folder(folder, dtype, through=lambda _, slices: served_base(slices, kind))


def quantise_base(decoder: Decoder, kind: str) -> None:
    """Hold the layers' matrices of a decoder in few bits, and let go of the wide ones. kind: "nf4" or "int8"."""
    views = {name: view for name, view in hf_views(decoder) if of_base(name)}
    hold(decoder, {name: quantise(view, kind) for name, view in views.items()})


def hold(decoder: Decoder, parts: dict[str, Quantised]) -> None:
    """Give each matrix of the layers its quantised form, by Hugging Face names, in place of its weight."""
    for linear, projections in list(stacked_modules(decoder)):
        linear.base = Base([parts[f"{module}.weight"] for module, _, _ in projections])
        form = linear.weight.detach().to("meta")
        del linear.weight
        linear.weight = form  # pyright: ignore[reportAttributeAccessIssue]


def bases(module: nn.Module) -> Iterator[Base]:
    return (each for each in module.modules() if isinstance(each, Base))


def base_numbers(decoder: Decoder) -> int:
    """The count of numbers that are held in few bits."""
    return sum(base.rows * base.inputs for base in bases(decoder))
