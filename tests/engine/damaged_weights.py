"""Weights as a trainer's bug or a broken transport would send them: each kind of damage that a fingerprint is for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tidemill.models.weight_slices import Slice


def dropped(pieces: list[Slice]) -> list[Slice]:
    return pieces[:-1]


def swapped(pieces: list[Slice]) -> list[Slice]:
    names = "0.mlp.gate_proj.weight", "0.mlp.up_proj.weight"
    one, other = (i for i, piece in enumerate(pieces) if piece.name.endswith(names))
    tensors = pieces[other].tensor, pieces[one].tensor
    pieces[one], pieces[other] = (replace(pieces[i], tensor=t) for i, t in zip((one, other), tensors, strict=True))
    return pieces


def transposed(pieces: list[Slice]) -> list[Slice]:
    return [replace(p, tensor=p.tensor.T.reshape(p.shape)) if p.tensor.ndim == 2 else p for p in pieces]


def stale(pieces: list[Slice]) -> list[Slice]:
    return [replace(pieces[0], tensor=pieces[0].tensor + 1), *pieces[1:]]


def half_written(pieces: list[Slice]) -> list[Slice]:
    tensor = pieces[1].tensor.clone()
    tensor.view(-1)[tensor.numel() // 2 :] = 0
    return [pieces[0], replace(pieces[1], tensor=tensor), *pieces[2:]]


def of_another_dtype(pieces: list[Slice]) -> list[Slice]:
    return [replace(piece, tensor=piece.tensor.bfloat16()) for piece in pieces]


DAMAGE: list[Callable[[list[Slice]], list[Slice]]] = [dropped, swapped, transposed, stale, half_written, of_another_dtype]
