"""Exports of a trained model as Hugging Face folders; an adapter's merged weights, and beside them itself."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import torch

from tidemill.models.adapter_config import AdapterConfig
from tidemill.models.adapter_files import export_adapter
from tidemill.models.decoder import Decoder
from tidemill.models.hf_weights import hf_views, save_folder, scored_tensors
from tidemill.models.lora import gathered_factors, merged_slices
from tidemill.models.value_model import ValueModel
from tidemill.models.weight_slices import Slice


def export_policy(
    decoder: Decoder, folder: Path, source: Path | None, dtype: torch.dtype, writes: bool, lora: AdapterConfig | None
) -> None:
    """Write the policy to `folder`, and its adapter to `folder`-adapter if it has one.

    All ranks call this, as all give what they hold; one `writes`. source: folder whose tokenizer is copied.
    """
    factors = gathered_factors(decoder)
    whole = (Slice.whole(*each) for each in hf_views(decoder))
    tensors = ((block.name, block.tensor) for block in merged_slices(whole, factors))
    if not writes:
        deque(tensors, 0)
        return
    save_folder(decoder, folder, tokenizer_from=source, dtype=dtype, tensors=tensors)
    if lora is not None:
        export_adapter(factors, lora, folder.with_name(f"{folder.name}-adapter"))


def export_scored(model: ValueModel, folder: Path, source: Path | None, dtype: torch.dtype, writes: bool) -> None:
    """Write a critic to `folder` as a model for sequence classification."""
    if writes:
        model.save(folder, tokenizer_from=source, dtype=dtype)
    else:
        deque(scored_tensors(model.decoder, model.head.weight), 0)
