"""The frozen weights of an engine whose versions are adapters, and each version as their sum.

    update -> received adapter, verified -> base's fingerprint -> W' = W + scale B A, in rows, from the pristine base
           -> a spare decoder, whose sums must be those of what was merged (`merging`), or new tensors (`whole`)

The base lies on the host, in the served dtype, and is never written: nothing is ever subtracted from merged weights. Its
words are compared each time it is read. Each sum is checked by a product: (W' - W) v must be scale B (A v).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from tidemill.core.errors import PolicyMismatch
from tidemill.core.weight_update import WeightUpdate
from tidemill.models.adapter_config import BaseDtype
from tidemill.models.adapter_update import ReceivedAdapter, factors_of
from tidemill.models.decoder import Decoder
from tidemill.models.fingerprint import Fingerprint, word_bits
from tidemill.models.hf_weights import empty_decoder, hf_views, loading
from tidemill.models.kernels.cuda.transfers import Uploads
from tidemill.models.lora import Factors, merged_slices
from tidemill.models.piecewise import Work, by_rows
from tidemill.models.quantised_base import load_served
from tidemill.models.served_weights import Contents
from tidemill.models.weight_slices import Slice, whole_tensors

SLACK = 1e-3  # of products in float32, as a share


class AdaptedBase:
    """The pristine weights that adapters are added to."""

    def __init__(self, decoder: Decoder, copy: bool = True) -> None:
        """Copy a decoder's weights. copy: False keeps those of one on the host, which nothing else may use then."""
        weight = decoder.embed.weight
        self.contents = Contents.of(decoder, weight.dtype)
        self._device = weight.device
        self._tensors = {name: view.detach().to("cpu", copy=copy) for name, view in hf_views(decoder)}
        self._shapes = empty_decoder(decoder.arch, weight.dtype, "meta")

    @classmethod
    def of_folder(cls, folder: str | Path, base_dtype: BaseDtype, dtype: torch.dtype) -> AdaptedBase:
        """The weights of a Hugging Face folder as adapters were trained on them, in the served dtype, on the host.

        Raises UnsupportedModel for a folder that is no such model.
        """
        return cls(load_served(folder, base_dtype, dtype), copy=False)

    def expect(self, update: WeightUpdate, engine: str) -> None:
        """Raise PolicyMismatch unless the update's adapter was trained on these weights."""
        expect_base(update, self.contents, engine)

    def merging(self, adapter: ReceivedAdapter, spare: Decoder, uploads: Uploads | None) -> Work[Contents]:
        """Fill the spare decoder with base and adapter; returns its contents, which are those of the sum.

        Raises PolicyMismatch if the adapter is not one of this model, or if other bytes than the sum's lie there then.
        """
        factors = factors_of(spare, adapter)
        expected = Fingerprint()
        yield
        try:
            yield from loading(spare, self._merged(self._placed(factors), expected), uploads)
        except ValueError as error:
            raise PolicyMismatch(f"the base and the adapter are no weights of this model: {error}") from error
        held = yield from Contents.summing(spare, spare.embed.weight.dtype)
        sums = expected.sums()
        if other := next((name for name, total in held.totals.items() if sums.get(name) != total), None):
            raise PolicyMismatch(f"{other} was staged with other numbers than base and adapter together")
        return held

    @torch.no_grad()
    def whole(self, adapter: ReceivedAdapter) -> tuple[dict[str, Tensor], Fingerprint]:
        """The sum of base and adapter, as new tensors by Hugging Face name, and their fingerprint. Blocking.

        Raises PolicyMismatch if the adapter is not one of this model, or if the base has changed in memory.
        """
        total = Fingerprint()
        return whole_tensors(self._merged(self._placed(factors_of(self._shapes, adapter)), total)), total

    def _placed(self, factors: Factors) -> Factors:
        return {name: (a.to(self._device), b.to(self._device), scale) for name, (a, b, scale) in factors.items()}

    def _merged(self, factors: Factors, expected: Fingerprint) -> Iterator[Slice]:
        """Base and adapter together, in blocks of rows, each added to `expected`."""
        for block in self._rows():
            (piece,) = merged_slices([block], factors)
            if block.name in factors:
                _expect_sum(block, piece.tensor, factors[block.name])
            expected.add(piece)
            yield piece

    def _rows(self) -> Iterator[Slice]:
        """The base in blocks of rows, on the device. Raises PolicyMismatch when it is not what it was."""
        for name, tensor in self._tensors.items():
            at, words = 0, list[int | Tensor]()
            for (rows,) in by_rows(tensor):
                words.append(word_bits(rows))
                offset = (at, *(0,) * (tensor.ndim - 1))
                yield Slice(name, tuple(tensor.shape), offset, rows.to(self._device))
                at += len(rows)
            if sum(int(part) for part in words) % 2**64 != self.contents.words[name]:
                raise PolicyMismatch(f"{name} of the frozen base has changed in memory since it was loaded")


def expect_base(update: WeightUpdate, loaded: Contents, engine: str) -> None:
    """Raise PolicyMismatch unless the update's adapter was trained on the weights that an engine has loaded."""
    trained_on = update.base and update.base.fingerprint
    if trained_on != loaded.fingerprint:
        raise PolicyMismatch(
            f"{update.version} is an adapter of a base with fingerprint {trained_on}, and {engine} has loaded one with "
            f"{loaded.fingerprint}: give trainer and engines the same model folder and dtype "
            "(engine.dtype, trainer.serving_dtype)"
        )


@torch.no_grad()
def _expect_sum(block: Slice, merged: Tensor, factor: tuple[Tensor, Tensor, float]) -> None:
    """Raise PolicyMismatch unless rows of a matrix and its adapter are their sum, but for rounding.

    Rounding moves an element by half an eps of itself at most, in any direction, so the product of all rows with signs by
    less than eps times the norm.
    """
    a, b, scale = factor
    signs = _signs(a.shape[1]).to(a.device)
    added = b[block.offset[0] : block.offset[0] + len(merged)] @ (a @ signs) * scale
    found = (merged.float() - block.tensor.float()) @ signs
    rounding = torch.finfo(merged.dtype).eps * torch.linalg.vector_norm(merged.float())
    if not (found - added).norm() <= rounding + SLACK * added.norm():  # NaN is refused, too
        raise PolicyMismatch(f"{block.name}: what was staged is not the base's matrix and its adapter's product together")


@lru_cache(maxsize=8)
def _signs(count: int) -> Tensor:
    return torch.randint(0, 2, (count,), generator=torch.Generator().manual_seed(0)).float() * 2 - 1
