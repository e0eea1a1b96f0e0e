"""A trainer on disk: a Hugging Face folder with the optimizer beside the weights. Safetensors and JSON, never pickle.

    config.json, *.safetensors, tokenizer   the master weights in their own dtype, by Hugging Face name
    optimizer.safetensors                   both moments by parameter name; the random states
    trainer.json                            format, updates done

A folder appears complete or not at all: it is written beside its place, forced to disk, then renamed. Loading checks
everything before it touches the trainer; what follows is then, on CPU, bit for bit what would have followed.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tidemill.durable import flush
from tidemill.models.architecture import Architecture, UnsupportedModel
from tidemill.models.decoder import Decoder
from tidemill.models.weights import hf_views, load_folder, save_folder
from tidemill.trainer.optimizer import Optimizer

FORMAT = 1
_OPTIMIZER, _STATE = "optimizer.safetensors", "trainer.json"
_CPU_RNG, _CUDA_RNG = "random.cpu", "random.cuda"


class CheckpointError(ValueError):
    """A folder that is not a checkpoint of this trainer. The message says what differs."""


def save_checkpoint(folder: Path, decoder: Decoder, optimizer: Optimizer, source: Path | None) -> None:
    """Write `folder`, replacing an older checkpoint there and nothing else."""
    folder = folder.resolve()
    if folder.exists() and not (folder.is_dir() and ((folder / _STATE).is_file() or not any(folder.iterdir()))):
        raise CheckpointError(f"{folder} exists and is no checkpoint: it is not overwritten; choose another folder")
    partial = folder.with_name(f".{folder.name}.partial-{secrets.token_hex(4)}")
    try:
        save_folder(decoder, partial, tokenizer_from=source, dtype=decoder.embed.weight.dtype)
        tensors = {name: t.contiguous().cpu() for name, t in (optimizer.state() | _random()).items()}
        save_file(tensors, partial / _OPTIMIZER)
        (partial / _STATE).write_text(json.dumps({"format": FORMAT, "updates": optimizer.done}))
        for path in (partial / _OPTIMIZER, partial / _STATE, partial):
            flush(path)
        _replace(folder, partial)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # gone already when it was moved


def load_checkpoint(folder: Path, decoder: Decoder, optimizer: Optimizer) -> None:
    """Put decoder, optimizer and random states back to where `save_checkpoint` found them. Raises CheckpointError."""
    updates = _read_state(folder / _STATE)
    tensors = _read_tensors(folder / _OPTIMIZER)
    random = {name: tensors.pop(name) for name in (_CPU_RNG, _CUDA_RNG) if name in tensors}
    if _CPU_RNG not in random:
        raise CheckpointError(f"{folder / _OPTIMIZER}: the random state is missing")
    _check(folder / _OPTIMIZER, tensors, optimizer.expected(updates))
    weights = _read_weights(folder, decoder)
    with torch.no_grad():
        for (_, view), (_, saved) in zip(hf_views(decoder), hf_views(weights), strict=True):
            view.copy_(saved)
    optimizer.restore(tensors, updates)
    torch.set_rng_state(random[_CPU_RNG])
    if _CUDA_RNG in random and torch.cuda.is_available():
        torch.cuda.set_rng_state(random[_CUDA_RNG])


def _replace(folder: Path, by: Path) -> None:
    """Between the two renames there is no `folder`: what stands aside is then the last checkpoint, still whole."""
    old = folder.with_name(f".{folder.name}.replaced-{secrets.token_hex(4)}")
    if folder.exists():
        os.replace(folder, old)
    os.replace(by, folder)
    flush(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _read_weights(folder: Path, decoder: Decoder) -> Decoder:
    dtype = decoder.embed.weight.dtype
    try:
        saved = load_folder(folder, dtype)
    except UnsupportedModel as error:
        raise CheckpointError(str(error)) from None
    if saved.arch != decoder.arch:
        names = [
            f.name for f in fields(Architecture) if f.compare and vars(saved.arch)[f.name] != vars(decoder.arch)[f.name]
        ]
        raise CheckpointError(f"{folder} holds another model than the one being trained: {', '.join(names)} differ")
    return saved


def _random() -> dict[str, Tensor]:
    states = {_CPU_RNG: torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states[_CUDA_RNG] = torch.cuda.get_rng_state()
    return states


def _read_state(file: Path) -> int:
    try:
        state = json.loads(file.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{file}: not readable ({error}); expected the folder of a checkpoint") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(
            f"{file}: format {state.get('format') if isinstance(state, dict) else state!r}, expected {FORMAT}"
        )
    updates = state.get("updates")
    if not isinstance(updates, int) or updates < 0:
        raise CheckpointError(f"{file}: updates = {updates!r}, expected a number >= 0")
    return updates


def _read_tensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: not readable ({error})") from None


def _check(file: Path, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise unless `found` has exactly the names of `expected`, each with that tensor's shape and dtype."""
    if missing := sorted(expected.keys() - found.keys()):
        raise CheckpointError(f"{file}: {len(missing)} tensors are missing, among them {missing[0]}; is it another model's?")
    if surplus := sorted(found.keys() - expected.keys()):
        raise CheckpointError(f"{file}: {len(surplus)} tensors do not belong here, among them {surplus[0]}")
    for name, tensor in expected.items():
        if (found[name].shape, found[name].dtype) != (tensor.shape, tensor.dtype):
            given, wanted = (f"{tuple(t.shape)} {t.dtype}" for t in (found[name], tensor))
            raise CheckpointError(f"{file}: {name} is {given}, this trainer has {wanted}")
