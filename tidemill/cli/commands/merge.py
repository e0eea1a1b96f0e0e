"""`tidemill merge ADAPTER OUT`: adds a low-rank adapter to its model, and writes the sum as a model folder."""

from __future__ import annotations

from pathlib import Path

import torch

from tidemill.cli.commands.screen import print_json
from tidemill.models.adapter_config import AdapterConfig
from tidemill.models.adapter_files import base_of, load_adapter
from tidemill.models.hf_weights import save_folder
from tidemill.models.lora import merge as add_up
from tidemill.models.quantised_base import load_served
from tidemill.observability.safe_text import visible


def merge(adapter: Path, out: Path, base: str, base_dtype: str, dtype: str, as_json: bool) -> int:
    """Load the base in float32, with the numbers that it had in training, add the adapter, and round once."""
    folder, held = base_of(adapter, base), base_dtype or AdapterConfig.from_folder(adapter).base_dtype
    decoder = load_served(folder, held)
    config = load_adapter(decoder, adapter)
    add_up(decoder)
    save_folder(decoder, out, tokenizer_from=folder, dtype=getattr(torch, dtype))
    if as_json:
        print_json({"model": str(out), "base": str(folder), "base_dtype": held, "rank": config.rank, "dtype": dtype})
    else:
        base_in = "" if held == "float32" else f" in {held}"
        print(f"  {visible(str(out))}: {visible(str(folder))}{base_in} with the adapter of rank {config.rank}, in {dtype}")
    return 0
