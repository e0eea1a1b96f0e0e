"""Folders of low-rank adapters as PEFT reads and writes them: `adapter_config.json` and `adapter_model.safetensors`.

A tensor `MODULE.lora_A.weight` here is `base_model.model.MODULE.lora_A.weight` there.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tidemill.core.atomic_files import put_in_place
from tidemill.core.errors import UnsupportedModel
from tidemill.models.adapter_config import ADAPTER_CONFIG, ADAPTER_WEIGHTS, AdapterConfig
from tidemill.models.block_files import BlockReader, rank_files
from tidemill.models.decoder import Decoder
from tidemill.models.hf_weights import load_folder
from tidemill.models.lora import A, B, Factors, adapter_blocks, attach, merge

ADAPTER_STEM = "adapter"  # of the files of several ranks
PREFIX = "base_model.model."
_DTYPES = ("F32", "BF16", "F16")


def load_adapter(decoder: Decoder, folder: str | Path) -> AdapterConfig:
    """Give the decoder the adapter of a folder; returns its configuration.

    Raises UnsupportedModel, and names the tensor, if the folder is not a whole adapter of this model.
    """
    folder = Path(folder)
    config = AdapterConfig.from_folder(folder)
    attach(decoder, config)
    fill(decoder, read_tensors(folder), f"{folder / ADAPTER_WEIGHTS}")
    return config


def load_merged(folder: str | Path, dtype: torch.dtype = torch.float32) -> Decoder:
    """The model of a folder: a Hugging Face model, or an adapter added to the base that its configuration names."""
    if not (Path(folder) / ADAPTER_CONFIG).is_file():
        return load_folder(folder, dtype)
    base = AdapterConfig.from_folder(folder).base
    if not Path(base).is_dir():
        raise UnsupportedModel(f"{folder} holds an adapter of the model {base!r}, which is no folder here")
    decoder = load_folder(base)
    load_adapter(decoder, folder)
    merge(decoder)
    return decoder.to(dtype)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of an adapter's folder, without PEFT's prefix. Raises UnsupportedModel if they cannot be read."""
    if files := rank_files(folder, ADAPTER_STEM):
        reader = BlockReader(files)
        return reader.read(reader.wholes())
    path = folder / ADAPTER_WEIGHTS
    if not path.is_file():
        pickled = " (convert its .bin file with save_pretrained of PEFT)" if any(folder.glob("adapter_model.bin")) else ""
        raise UnsupportedModel(f"{folder}: no {ADAPTER_WEIGHTS} there{pickled}")
    found = dict[str, Tensor]()
    try:
        with safe_open(path, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (not a dict)
                if (dtype := tensors.get_slice(name).get_dtype()) not in _DTYPES:
                    raise UnsupportedModel(f"{path}: {name} is {dtype}; expected {', '.join(_DTYPES)}")
                found[name.removeprefix(PREFIX)] = tensor = tensors.get_tensor(name)
                if not torch.isfinite(tensor).all():
                    raise UnsupportedModel(f"{path}: {name} holds NaN or infinity; save the adapter again")
    except (OSError, SafetensorError) as error:
        raise UnsupportedModel(f"{path}: {error}") from None
    return found


@torch.no_grad()
def fill(decoder: Decoder, tensors: Mapping[str, Tensor], where: str) -> None:
    """Copy every A and B into the decoder's adapters, of several ranks the rows that each holds.

    Raises UnsupportedModel, and changes nothing, unless the tensors are those of the adapters.
    """
    blocks = list(adapter_blocks(decoder))
    expected = {block.name: block.shape for block in blocks}
    for name, tensor in tensors.items():
        if name not in expected:
            raise UnsupportedModel(f"{where}: {name} belongs to no adapter that its configuration names for this model")
        if tuple(tensor.shape) != expected[name]:
            raise UnsupportedModel(f"{where}: {name} is {list(tensor.shape)}, expected {list(expected[name])}")
    if missing := [name for name in expected if name not in tensors]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UnsupportedModel(f"{where}: {missing[0]}{more} is missing")
    for block in blocks:
        first = block.offset[0]
        block.tensor.copy_(tensors[block.name][first : first + len(block.tensor)])


def export_adapter(factors: Factors, config: AdapterConfig, folder: Path) -> None:
    """Write whole adapters to a folder, in place of an earlier one, which appears when it is complete."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
    partial.mkdir(parents=True)
    try:
        named = {name.removesuffix("weight"): (a, b) for name, (a, b, _) in factors.items()}
        save_adapter({f"{m}{k}": t for m, pair in named.items() for k, t in zip((A, B), pair, strict=True)}, config, partial)
        put_in_place(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # gone already when it was moved


def save_adapter(
    tensors: Mapping[str, Tensor], config: AdapterConfig, folder: Path, base: str = "", *, empty: bool = False
) -> None:
    """Write an adapter into a folder that exists.

    base: name or folder of the model that it belongs to. empty: only the configuration, as others write the tensors.
    """
    (folder / ADAPTER_CONFIG).write_text((replace(config, base=base) if base else config).to_json())
    if empty:
        return
    given = {PREFIX + name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(given, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
