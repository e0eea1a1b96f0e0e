"""Folders of low-rank adapters as PEFT reads and writes them: `adapter_config.json` and `adapter_model.safetensors`.

A tensor `MODULE.lora_A.weight` here is `base_model.model.MODULE.lora_A.weight` there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tidemill.core.atomic_files import whole_folder
from tidemill.core.errors import CheckpointError, PolicyMismatch, UnsupportedModel
from tidemill.models.adapter_config import ADAPTER_CONFIG, ADAPTER_WEIGHTS, AdapterConfig, BaseDtype
from tidemill.models.block_files import rank_files
from tidemill.models.decoder import Decoder
from tidemill.models.hf_files import file_slices
from tidemill.models.hf_weights import SCORE
from tidemill.models.lora import A, B, Factors, adapter_blocks, attach, merge
from tidemill.models.quantised_base import load_served
from tidemill.models.weight_slices import whole_tensors

ADAPTER_STEM = "adapter"  # of the files of several ranks
PREFIX = "base_model.model."


def load_adapter(decoder: Decoder, folder: str | Path) -> AdapterConfig:
    """Give the decoder the adapter of a folder; returns its configuration.

    Raises UnsupportedModel, and names the tensor, if the folder is not a whole adapter of this model.
    """
    folder = Path(folder)
    config = AdapterConfig.from_folder(folder)
    attach(decoder, config)
    fill_from(decoder, folder)
    return config


def fill_from(decoder: Decoder, folder: str | Path) -> None:
    """Copy a folder's adapter into the one that the decoder has. Raises UnsupportedModel, and changes nothing, else."""
    folder = Path(folder).expanduser()
    fill(decoder, read_tensors(folder), f"{folder / ADAPTER_WEIGHTS}")


def load_merged(folder: str | Path, dtype: torch.dtype = torch.float32, base_dtype: BaseDtype = "float32") -> Decoder:
    """The model of a folder: a Hugging Face model, or an adapter added to its base. Raises UnsupportedModel.

    base_dtype: of a model's folder, the numbers that an adapter is trained on; an adapter's folder says so itself.
    """
    if not (Path(folder) / ADAPTER_CONFIG).is_file():
        return load_served(folder, base_dtype, dtype)
    decoder = load_served(base_of(folder), AdapterConfig.from_folder(folder).base_dtype)
    load_adapter(decoder, folder)
    merge(decoder)
    return decoder.to(dtype)


def base_of(folder: str | Path, named: str = "") -> Path:
    """The folder of an adapter's base model. named: in place of what the adapter's configuration names."""
    base = named or AdapterConfig.from_folder(folder).base
    for path in (Path(base).expanduser(), Path(folder) / base):
        if base and path.is_dir():
            return path
    what = f"its base model {base!r} is no folder here" if base else f"{ADAPTER_CONFIG} names no base model"
    raise UnsupportedModel(f"{folder}: {what}; give the base's folder, as in `tidemill merge ADAPTER OUT --base FOLDER`")


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of an adapter's folder, without PEFT's prefix. Raises UnsupportedModel if they cannot be read."""
    try:
        files = rank_files(folder, ADAPTER_STEM) or [folder / ADAPTER_WEIGHTS]
        if not files[0].is_file():
            pickled = " (convert its .bin file with save_pretrained of PEFT)" if any(folder.glob("*.bin")) else ""
            raise UnsupportedModel(f"{folder}: no {ADAPTER_WEIGHTS} there{pickled}")
        pieces = [piece for file in files for piece in file_slices(file, folder)]
        return whole_tensors(replace(piece, name=piece.name.removeprefix(PREFIX)) for piece in pieces)
    except (CheckpointError, PolicyMismatch) as error:  # files of ranks that are not all there
        raise UnsupportedModel(str(error)) from None


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


def export_adapter(factors: Factors, config: AdapterConfig, folder: Path, score: Tensor | None = None) -> None:
    """Write whole adapters to a folder, in place of an earlier one, which appears when it is complete.

    score: the head of a reward model, [1, D]; PEFT then reads the folder as one for sequence classification.
    """
    named = {name.removesuffix("weight"): (a, b) for name, (a, b, _) in factors.items()}
    tensors = {f"{m}{k}": t for m, pair in named.items() for k, t in zip((A, B), pair, strict=True)}
    if score is not None:
        tensors, config = {**tensors, SCORE: score}, replace(config, task="SEQ_CLS")
    with whole_folder(folder) as partial:
        save_adapter(tensors, config, partial)


def save_adapter(tensors: Mapping[str, Tensor], config: AdapterConfig, folder: Path) -> None:
    """Write an adapter into a folder that exists; without tensors, as ranks write those, the configuration alone."""
    config.write(folder)
    if not tensors:
        return
    given = {PREFIX + name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(given, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
