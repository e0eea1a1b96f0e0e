"""Exports of a trained model as Hugging Face folders: an adapter's merged weights, and beside them itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from tidemill.models.adapter_config import AdapterConfig
from tidemill.models.adapter_files import export_adapter
from tidemill.models.decoder import Decoder
from tidemill.models.hf_weights import hf_views, save_folder, scored_tensors
from tidemill.models.local_shards import full
from tidemill.models.lora import Factors, gathered_factors, merged_slices
from tidemill.models.value_model import ValueModel
from tidemill.models.weight_slices import Slice


def export_policy(
    decoder: Decoder, folder: Path, source: Path | None, dtype: torch.dtype, writes: bool, lora: AdapterConfig | None
) -> None:
    """Write the policy to `folder`, and its adapter to `folder`-adapter if it has one.

    All ranks call this, as all give what they hold; one `writes`. source: folder whose tokenizer is copied.
    """
    factors = gathered_factors(decoder)
    tensors = _merged(hf_views(decoder), factors)
    if not writes:
        deque(tensors, 0)
        return
    save_folder(decoder, folder, tokenizer_from=source, dtype=dtype, tensors=tensors)
    if lora is not None:
        export_adapter(factors, lora, _beside(folder))


def export_scored(
    model: ValueModel, folder: Path, source: Path | None, dtype: torch.dtype, writes: bool, lora: AdapterConfig | None
) -> None:
    """Write a critic to `folder` as a model for sequence classification, and beside it its adapter with the head.

    Arguments are as those of `export_policy`.
    """
    factors, head = gathered_factors(model.decoder), full(model.head.weight.detach())
    tensors = _merged(scored_tensors(model.decoder, head), factors)
    if not writes:
        deque(tensors, 0)
        return
    model.save(folder, tokenizer_from=source, dtype=dtype, tensors=tensors)
    if lora is not None:
        export_adapter(factors, lora, _beside(folder), head)


def _merged(tensors: Iterable[tuple[str, Tensor]], factors: Factors) -> Iterator[tuple[str, Tensor]]:
    blocks = (Slice.whole(*each) for each in tensors)
    return ((block.name, block.tensor) for block in merged_slices(blocks, factors))


def _beside(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-adapter")
