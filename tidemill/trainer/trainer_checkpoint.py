"""Trainer checkpoints: a Hugging Face folder with the optimizer's state, without pickle.

    config.json, *.safetensors, tokenizer   the master weights in their own dtype, by Hugging Face name
    adapter_config.json, adapter_model...   in their place the adapter, as PEFT has it, if only that is trained
    optimizer.safetensors                   both moments by parameter name; the random states; the state of each `Kept`
    trainer.json                            format, updates done

Of several ranks, each writes the rows that it holds, as `model-rank-1-of-2.safetensors` and `optimizer-rank-1-of-2...`
(`models.block_files`). Any number of ranks can read either form. Errors of narrow sums are `feedback.REPLICA.PARAMETER`; a
checkpoint without any is read as one of zeros (`replica_sums`).

`Snapshot` is a copy in host memory: training continues while it is made, up to the next update, and while it is written. The
checkpoint's manifest and rename make its folder complete (`run/storage/`). Loading checks everything before it changes the
trainer. On a CPU, training then continues bit for bit as it would have without the interruption.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import compress
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from tidemill.core.errors import CheckpointError, CodecError, UnsupportedModel
from tidemill.core.serialization import parse_json
from tidemill.models.adapter_config import ADAPTER_WEIGHTS
from tidemill.models.adapter_files import ADAPTER_STEM, PREFIX, save_adapter
from tidemill.models.architecture import Architecture
from tidemill.models.block_files import BlockReader, rank_file, rank_files, write_blocks
from tidemill.models.decoder import Decoder
from tidemill.models.hf_weights import hf_blocks, hf_views, load_folder, write_model
from tidemill.models.host_memory import host_tensors
from tidemill.models.lora import adapter_blocks, has_adapter, trained_blocks
from tidemill.models.weight_slices import Slice
from tidemill.trainer.moments import DecodedBlock
from tidemill.trainer.optimizer import Optimizer
from tidemill.trainer.publication import TrainedAdapter
from tidemill.trainer.ranks import Ranks
from tidemill.trainer.replica_sums import ReplicaSums

Restore = Callable[[], None]
"""Restores a trainer to a checkpoint that was read and checked; called once."""

FORMAT = 1
_STEM, _STATE = "optimizer", "trainer.json"
OPTIMIZER = f"{_STEM}.safetensors"
_CPU_RNG, _CUDA_RNG = "random.cpu", "random.cuda"


class Kept(Protocol):
    """State of a trainer besides policy and optimizer: a critic or a moving reference."""

    def state(self) -> list[Slice]:
        """Blocks for a checkpoint: the rows that this rank holds."""
        ...

    def expected(self, updates: int) -> list[Slice]:
        """`state()` after `updates` updates, by name, shape and dtype."""
        ...

    def restore(self, state: dict[str, Tensor], updates: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of a trainer's complete state at one moment, complete once `copy` has returned; of one rank, its part."""

    arch: Architecture
    dtype: torch.dtype
    ranks: Ranks
    weights: list[Slice]  # by Hugging Face name
    optimizer: list[Slice]  # both moments by parameter name, the state of each `Kept`, and this replica's errors
    random: dict[str, Tensor]  # states of random generators
    updates: int
    left: list[tuple[Tensor, Slice]]  # still to be copied: tensors of this snapshot, and the trainer's blocks for them

    @classmethod
    def take(
        cls,
        decoder: Decoder,
        optimizer: Optimizer,
        kept: Sequence[Kept] = (),
        room: Snapshot | None = None,
        ranks: Ranks | None = None,
        sums: ReplicaSums | None = None,
    ) -> Snapshot:
        """Begin a snapshot of weights, moments, random states, `kept` and errors of `sums`; `copy` completes it.

        Until `copy` has returned, the trainer's tensors may be read but not changed. room: an unused snapshot whose memory
        is reused, because allocating memory takes longer than the copy."""
        state = [*optimizer.state(), *(block for each in kept for block in each.state())]
        return cls._of(decoder, state, _random(), optimizer.done, room, ranks or Ranks(), sums)

    @classmethod
    def room(
        cls,
        decoder: Decoder,
        optimizer: Optimizer,
        kept: Sequence[Kept] = (),
        ranks: Ranks | None = None,
        sums: ReplicaSums | None = None,
    ) -> Snapshot:
        """Allocate and touch the memory that `take` needs, so that a lack of it shows before training."""
        expected = [*optimizer.expected(1), *(block for each in kept for block in each.expected(1))]
        found = cls._of(decoder, expected, {}, 0, None, ranks or Ranks(), sums)
        found.copy()
        return found

    @classmethod
    def _of(
        cls,
        decoder: Decoder,
        state: list[Slice],
        random: dict[str, Tensor],
        updates: int,
        room: Snapshot | None,
        ranks: Ranks,
        sums: ReplicaSums | None,
    ) -> Snapshot:
        own, state = list(ranks.own(trained_blocks(decoder))), [*ranks.own(state), *(sums.state() if sums else ())]
        weights, kept = _places(own, room.weights if room else ()), _places(state, room.optimizer if room else ())
        left = [(place.tensor, block) for place, block in zip([*weights, *kept], [*own, *state], strict=True)]
        return cls(decoder.arch, decoder.embed.weight.dtype, ranks, weights, kept, random, updates, left)

    def copy(self) -> None:
        """Copy the tensors, from a GPU into pinned memory; other threads run meanwhile."""
        if self.left:
            places, blocks = zip(*self.left, strict=True)
            tensors = [block.tensor for block in blocks]
            as_they_are = [not isinstance(block, DecodedBlock) for block in blocks]
            with torch.no_grad():
                torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
                    [*compress(places, as_they_are)], [*compress(tensors, as_they_are)], non_blocking=True
                )
                for place, block in self.left:
                    if isinstance(block, DecodedBlock) and block.write is not None and place.numel():
                        block.write(place)
            for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
                torch.cuda.synchronize(device)  # bounded: by the copies above
        self.left.clear()

    def write(
        self, folder: Path, source: Path | None, wrote: Callable[[Path], None], adapter: TrainedAdapter | None = None
    ) -> None:
        """Write the snapshot to `folder`, of one rank its files. Raises CheckpointError when that fails.

        source: folder whose tokenizer is copied. wrote: called with each large file when it is written. adapter:
        whose weights these are.
        """
        rank, several = self.ranks.rank, self.ranks.size > 1
        try:
            folder.mkdir(parents=True, exist_ok=several)
            if rank == 0:
                whole = {} if several else {block.name: block.tensor for block in self.weights}
                if adapter is None:
                    write_model(folder, self.arch, whole.items(), source, self.dtype)
                else:
                    save_adapter(whole, adapter.config, folder)
            stem = "model" if adapter is None else ADAPTER_STEM
            if several:
                write_blocks(folder / rank_file(stem, rank, self.ranks.size), self.weights)
            for file in sorted(folder.glob(rank_file(stem, rank, self.ranks.size) if several else "*.safetensors")):
                wrote(file)
            random = [Slice.whole(*each) for each in self.random.items() if rank == 0]
            path = folder / (rank_file(_STEM, rank, self.ranks.size) if several else OPTIMIZER)
            write_blocks(path, [*self.optimizer, *random], save_file)
            wrote(path)
            if rank == 0:
                state = {"format": FORMAT, "updates": self.updates} | (adapter.bases if adapter else {})
                (folder / _STATE).write_text(json.dumps(state))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder}: {error}") from error


def _places(blocks: Iterable[Slice], room: Iterable[Slice]) -> list[Slice]:
    """A host tensor of the same shape and dtype for each block, from `room` where one fits."""
    known, blocks = {block.name: block.tensor for block in room}, list(blocks)

    def fits(block: Slice) -> bool:
        there = known.get(block.name)
        return there is not None and (there.shape, there.dtype) == (block.tensor.shape, block.tensor.dtype)

    new = [block.tensor for block in blocks if not fits(block)]
    made = iter(host_tensors(new, new[0].device) if new else ())
    return [replace(block, tensor=known[block.name] if fits(block) else next(made)) for block in blocks]


def read_checkpoint(
    folder: Path,
    decoder: Decoder,
    optimizer: Optimizer,
    kept: Sequence[Kept],
    sums: ReplicaSums,
    adapter: TrainedAdapter | None = None,
) -> Restore:
    """Read a checkpoint of decoder, optimizer, random states, `kept` and `sums`; returns what restores them to it.

    Any number of ranks may have written it, and each rank reads the rows that it holds. Raises CheckpointError when the
    folder does not fit. Nothing is changed before the restoration.
    """
    updates = _read_state(folder / _STATE, adapter)
    files = rank_files(folder, _STEM) or [folder / OPTIMIZER]
    reader = BlockReader(files)
    random = {name: state for name in (_CPU_RNG, _CUDA_RNG) if (state := reader.whole(name)) is not None}
    if _CPU_RNG not in random:
        raise CheckpointError(f"{files[0]}: the random state is missing")
    parts = [(each, each.expected(updates)) for each in kept]
    expected = [*optimizer.expected(updates), *(block for _, blocks in parts for block in blocks)]
    errors = sums.saved(reader.names)
    reader.check(files[0], [*expected, *(block for blocks in errors for block in blocks)], random)
    weights, tensors, owed = _read_weights(folder, decoder), reader.read(expected), sums.owed(errors, reader.read)

    def restore() -> None:
        with torch.no_grad():
            for block, saved in zip(trained_blocks(decoder), weights, strict=True):
                block.tensor.copy_(saved)
        for each, blocks in parts:
            each.restore({block.name: tensors.pop(block.name) for block in blocks}, updates)
        optimizer.restore(tensors, updates)
        sums.restore(owed)
        torch.set_rng_state(random[_CPU_RNG])
        if _CUDA_RNG in random and torch.cuda.is_available():
            torch.cuda.set_rng_state(random[_CUDA_RNG])

    return restore


def _read_weights(folder: Path, decoder: Decoder) -> Iterator[Tensor]:
    """The rows that this process holds of every tensor, in the order of `trained_blocks`. Everything is checked first."""
    if has_adapter(decoder):
        return _read_adapter(folder, decoder)
    saved = _read_model(folder, decoder)
    rows = ((block.offset[0], len(block.tensor)) for block in hf_blocks(decoder))
    return (view[first : first + n] for (first, n), (_, view) in zip(rows, hf_views(saved), strict=True))


def _read_adapter(folder: Path, decoder: Decoder) -> Iterator[Tensor]:
    files = rank_files(folder, ADAPTER_STEM) or [folder / ADAPTER_WEIGHTS]
    prefix = "" if len(files) > 1 else PREFIX
    blocks = [replace(block, name=prefix + block.name) for block in adapter_blocks(decoder)]
    reader = BlockReader(files)
    reader.check(files[0], blocks, ())
    found = reader.read(blocks)
    return (found[block.name] for block in blocks)


def _read_model(folder: Path, decoder: Decoder) -> Decoder:
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


def _read_state(file: Path, adapter: TrainedAdapter | None) -> int:
    """The number of updates done. Raises CheckpointError if an adapter was trained on another base."""
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
    if adapter is not None:
        _expect_bases(file, state, adapter)
    return updates


def _expect_bases(file: Path, state: dict[str, Any], adapter: TrainedAdapter) -> None:
    for name, base in adapter.bases.items():
        whose, model = ("the adapter", adapter.config.base) if name == "base" else ("the critic's adapter", "its model")
        if state.get(name) != base:
            raise CheckpointError(
                f"{file}: {whose} was trained on a base with the fingerprint {state.get(name)}, and {model} has {base} now: "
                "bring back the model folder as it was, or begin a new run"
            )
