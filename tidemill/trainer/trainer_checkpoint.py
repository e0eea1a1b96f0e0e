"""Trainer checkpoints: a Hugging Face folder with the optimizer's state, without pickle.

    config.json, *.safetensors, tokenizer   the master weights in their own dtype, by Hugging Face name
    optimizer.safetensors                   both moments by parameter name; the random states; the state of each `Kept`
    trainer.json                            format, updates done

`Snapshot` is a copy in host memory: training continues while it is made, up to the next update, and while it is written. The
checkpoint's manifest and rename make its folder complete (`run/storage/`). Loading checks everything before it changes the
trainer. On a CPU, training then continues bit for bit as it would have without the interruption.
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

from tidemill.core.errors import CheckpointError, CodecError, UnsupportedModel
from tidemill.core.serialization import parse_json
from tidemill.models.architecture import Architecture
from tidemill.models.decoder import Decoder
from tidemill.models.hf_weights import hf_views, load_folder, write_model
from tidemill.trainer.optimizer import Optimizer

FORMAT = 1
OPTIMIZER, _STATE = "optimizer.safetensors", "trainer.json"
_CPU_RNG, _CUDA_RNG = "random.cpu", "random.cuda"


class Kept(Protocol):
    """State of a trainer besides policy and optimizer: a critic or a moving reference."""

    def state(self) -> dict[str, Tensor]:
        """Tensors for a checkpoint, by name."""
        ...

    def expected(self, updates: int) -> dict[str, Tensor]:
        """Names of `state()` after `updates` updates, each with a tensor of its shape and dtype."""
        ...

    def restore(self, state: dict[str, Tensor], updates: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of a trainer's complete state at one moment, complete once `copy` has returned."""

    arch: Architecture
    dtype: torch.dtype
    weights: dict[str, Tensor]  # by Hugging Face name
    optimizer: dict[str, Tensor]  # both moments by parameter name; the random states; the state of each `Kept`
    updates: int
    left: list[tuple[Tensor, Tensor]]  # still to be copied: tensors of this snapshot, and the trainer's tensors for them

    @classmethod
    def take(
        cls, decoder: Decoder, optimizer: Optimizer, kept: Sequence[Kept] = (), room: Snapshot | None = None
    ) -> Snapshot:
        """Begin a snapshot of weights, moments, random states and `kept`; `copy` completes it.

        Until `copy` has returned, the trainer's tensors may be read but not changed. room: an unused snapshot whose memory
        is reused, because allocating memory takes longer than the copy."""
        state = [optimizer.state(), *(each.state() for each in kept)]
        return cls._of(decoder, _together(state), _random(), optimizer.done, room)

    @classmethod
    def room(cls, decoder: Decoder, optimizer: Optimizer, kept: Sequence[Kept] = ()) -> Snapshot:
        """Allocate and touch the memory that `take` needs, so that a lack of it shows before training."""
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
        """Copy the tensors, from a GPU into pinned memory; other threads run meanwhile."""
        if self.left:
            places, tensors = zip(*self.left, strict=True)
            with torch.no_grad():
                torch._foreach_copy_(list(places), list(tensors), non_blocking=True)  # pyright: ignore[reportPrivateImportUsage]
            for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
                torch.cuda.synchronize(device)  # bounded: by the copies above
        self.left.clear()

    def write(self, folder: Path, source: Path | None, wrote: Callable[[Path], None]) -> None:
        """Write the snapshot to a new `folder`. Raises CheckpointError when that fails.

        source: folder whose tokenizer is copied. wrote: called with each large file when it is written.
        """
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
    """A host tensor of the same shape and dtype for each tensor, from `room` where one fits."""

    def place(name: str, like: Tensor) -> Tensor:
        there = room.get(name)
        if there is not None and (there.shape, there.dtype) == (like.shape, like.dtype):
            return there
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)

    return {name: place(name, tensor) for name, tensor in tensors.items()}


def load_checkpoint(folder: Path, decoder: Decoder, optimizer: Optimizer, kept: Sequence[Kept] = ()) -> None:
    """Restore decoder, optimizer, random states and `kept` to the moment of the snapshot.

    Raises CheckpointError, and changes nothing, when the folder does not fit.
    """
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
    """Raise CheckpointError unless `found` has the names, shapes and dtypes of `expected`."""
    if missing := sorted(expected.keys() - found.keys()):
        raise CheckpointError(f"{file}: {len(missing)} tensors are missing, among them {missing[0]}; is it another model's?")
    if surplus := sorted(found.keys() - expected.keys()):
        raise CheckpointError(f"{file}: {len(surplus)} tensors do not belong here, among them {surplus[0]}")
    for name, tensor in expected.items():
        if (found[name].shape, found[name].dtype) != (tensor.shape, tensor.dtype):
            given, wanted = (f"{tuple(t.shape)} {t.dtype}" for t in (found[name], tensor))
            raise CheckpointError(f"{file}: {name} is {given}, this trainer has {wanted}")
