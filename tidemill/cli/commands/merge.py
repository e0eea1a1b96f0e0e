"""`tidemill merge ADAPTER OUT`: adds a low-rank adapter to its model, and writes the sum as a model folder."""

from __future__ import annotations

from pathlib import Path

import torch

from tidemill.cli.commands.screen import print_json
from tidemill.models.adapter_files import base_of, load_adapter
from tidemill.models.hf_weights import load_folder, save_folder
from tidemill.models.lora import merge as add_up
from tidemill.observability.safe_text import visible


def merge(adapter: Path, out: Path, base: str, dtype: str, as_json: bool) -> int:
    """Load the base in float32, add the adapter, and round once."""
    folder = base_of(adapter, base)
    decoder = load_folder(folder, dtype=torch.float32)
    config = load_adapter(decoder, adapter)
    add_up(decoder)
    save_folder(decoder, out, tokenizer_from=folder, dtype=getattr(torch, dtype))
    if as_json:
        print_json({"model": str(out), "base": str(folder), "rank": config.rank, "dtype": dtype})
    else:
        print(f"  {visible(str(out))}: {visible(str(folder))} with the adapter of rank {config.rank}, in {dtype}")
    return 0
