"""A trainer on disk: a Hugging Face folder with the optimizer beside the weights. Safetensors and JSON, never pickle.

    config.json, *.safetensors, tokenizer   the master weights in their own dtype, by Hugging Face name
    optimizer.safetensors                   both moments by parameter name; the random states; what else is `Kept`
    trainer.json                            format, updates done

`Snapshot` is a copy in host memory: training goes on while it is made, up to the next update, and what is written does not
change any more. Its folder is one part of a checkpoint, whose manifest and rename make it whole (`run/storage/`).
Loading checks everything before it touches the trainer; what follows is then, on CPU, bit for bit what would have followed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tidemill.core.interfaces import CheckpointError
from tidemill.core.serialization import CodecError, parse_json
from tidemill.models.architecture import Architecture, UnsupportedModel
from tidemill.models.decoder import Decoder
from tidemill.models.hf_weights import hf_views, load_folder, write_model
from tidemill.trainer.optimizer import Optimizer

FORMAT = 1
OPTIMIZER, _STATE = "optimizer.safetensors", "trainer.json"
_CPU_RNG, _CUDA_RNG = "random.cpu", "random.cuda"


class Kept(Protocol):
    """What a trainer has beside policy and optimizer."""

    def state(self) -> dict[str, Tensor]:
        """By name, what a checkpoint must hold of it."""
        ...

    def expected(self, updates: int) -> dict[str, Tensor]:
        """Names of `state()` after so many updates, each with a tensor of its shape and dtype."""
        ...

    def restore(self, state: dict[str, Tensor], updates: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that a trainer is at one moment, in memory that is not the trainer's; it is that when `copy` has returned."""

    arch: Architecture
    dtype: torch.dtype
    weights: dict[str, Tensor]  # by Hugging Face name
    optimizer: dict[str, Tensor]  # both moments by parameter name; the random states; of `Kept` what they hold
    updates: int
    left: list[tuple[Tensor, Tensor]]  # each place in that memory, and the trainer's tensor that is to be copied there

    @classmethod
    def take(
        cls, decoder: Decoder, optimizer: Optimizer, kept: Sequence[Kept] = (), room: Snapshot | None = None
    ) -> Snapshot:
        """Of weights, both moments, random states and what else is kept. All but the random states may be read until `copy`
        has returned, and not be changed.

        room: one that nobody needs any more, whose memory is used: new memory takes longer than the copy."""
        state = [optimizer.state(), *(each.state() for each in kept)]
        return cls._of(decoder, _together(state), _random(), optimizer.done, room)

    @classmethod
    def room(cls, decoder: Decoder, optimizer: Optimizer, kept: Sequence[Kept] = ()) -> Snapshot:
        """The memory that `take` will need, touched: what does not fit is known before anything is trained."""
        expected = [optimizer.expected(1), *(each.expected(1) for each in kept)]
        found = cls._of(decoder, _together(expected), {}, 0, None)
        found.copy()
        return found

    @classmethod
    def _of(
        cls, decoder: Decoder, state: dict[str, Tensor], random: dict[str, Tensor], updates: int, room: Snapshot | None
    ) -> Snapshot:
        own = dict(hf_views(decoder))
        weights, kept = _places(own, room.weights if room else {}), _places(state, room.optimizer if room else {})
        left = [*zip(weights.values(), own.values(), strict=True), *zip(kept.values(), state.values(), strict=True)]
        return cls(decoder.arch, decoder.embed.weight.dtype, weights, kept | random, updates, left)

    def copy(self) -> None:
        """As fast as memory is, from a GPU into pinned memory. Other threads go on meanwhile: it is one call of torch's."""
        if self.left:
            places, tensors = zip(*self.left, strict=True)
            with torch.no_grad():
                torch._foreach_copy_(list(places), list(tensors), non_blocking=True)  # pyright: ignore[reportPrivateImportUsage]
            for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
                torch.cuda.synchronize(device)  # bounded: by the copies above
        self.left.clear()

    def write(self, folder: Path, source: Path | None, wrote: Callable[[Path], None]) -> None:
        """Make `folder`. source: whose tokenizer goes with it. wrote: is told of each big file. Raises CheckpointError."""
        try:
            folder.mkdir(parents=True)
            write_model(folder, self.arch, self.weights.items(), source, self.dtype)
            for file in sorted(folder.glob("*.safetensors")):
                wrote(file)
            save_file(self.optimizer, folder / OPTIMIZER)
            wrote(folder / OPTIMIZER)
            (folder / _STATE).write_text(json.dumps({"format": FORMAT, "updates": self.updates}))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder}: {error}") from error


def _together(states: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor for state in states for name, tensor in state.items()}


def _places(tensors: Mapping[str, Tensor], room: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """For each of the tensors one of its form in host memory: that of `room`, where it fits."""

    def place(name: str, like: Tensor) -> Tensor:
        there = room.get(name)
        if there is not None and (there.shape, there.dtype) == (like.shape, like.dtype):
            return there
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)

    return {name: place(name, tensor) for name, tensor in tensors.items()}


def load_checkpoint(folder: Path, decoder: Decoder, optimizer: Optimizer, kept: Sequence[Kept] = ()) -> None:
    """Put decoder, optimizer, random states and what else is kept back to where the snapshot was taken. Raises
    CheckpointError."""
    updates = _read_state(folder / _STATE)
    tensors = _read_tensors(folder / OPTIMIZER)
    random = {name: tensors.pop(name) for name in (_CPU_RNG, _CUDA_RNG) if name in tensors}
    if _CPU_RNG not in random:
        raise CheckpointError(f"{folder / OPTIMIZER}: the random state is missing")
    parts = [(each, each.expected(updates)) for each in kept]
    _check(folder / OPTIMIZER, tensors, _together([optimizer.expected(updates), *(names for _, names in parts)]))
    weights = _read_weights(folder, decoder)
    with torch.no_grad():
        for (_, view), (_, saved) in zip(hf_views(decoder), hf_views(weights), strict=True):
            view.copy_(saved)
    for each, names in parts:
        each.restore({name: tensors.pop(name) for name in names}, updates)
    optimizer.restore(tensors, updates)
    torch.set_rng_state(random[_CPU_RNG])
    if _CUDA_RNG in random and torch.cuda.is_available():
        torch.cuda.set_rng_state(random[_CUDA_RNG])


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
        state = parse_json(file.read_bytes())
    except (OSError, CodecError) as error:
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
