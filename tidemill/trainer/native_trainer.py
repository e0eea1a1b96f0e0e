"""NativeTrainer: the Trainer protocol on the project's own decoder, on one device or one rank of several.

Every call hands one blocking function to `offload`. The default calls it directly, so that a breakpoint works; a process
host passes a one-thread executor, so that its event loop stays free. Only a snapshot is copied and written concurrently:
calls that would change its source wait for the copy.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from tidemill.core import fault_injection
from tidemill.core.errors import CheckpointError, TransferFailed
from tidemill.core.executors import in_thread
from tidemill.core.seeding import derive_seed
from tidemill.core.types import Array, LossSpec, Metrics, Sample, Telemetry, TrainResult, Version
from tidemill.core.weight_update import WeightUpdate
from tidemill.models.adapter_config import AdapterConfig
from tidemill.models.adapter_dropout import Dropout
from tidemill.models.decoder import Decoder
from tidemill.models.host_memory import give_back
from tidemill.models.trained_linear import MIXES
from tidemill.models.weight_slices import LiveSender, Sender
from tidemill.runtime.cpu_sharing import Cores
from tidemill.trainer import training_pass
from tidemill.trainer.companions import Critic, Reference
from tidemill.trainer.exports import export_policy, export_scored
from tidemill.trainer.optimizer import Optimizer
from tidemill.trainer.parallel_micro_batches import Lanes
from tidemill.trainer.publication import DTYPES, Publication, TrainedAdapter
from tidemill.trainer.ranks import Ranks
from tidemill.trainer.telemetry import Offload, Recorder
from tidemill.trainer.trainer_checkpoint import Restore, Snapshot, read_checkpoint
from tidemill.trainer.trainer_kinds import AdamWSettings

T = TypeVar("T")
LEAVES = ("cuda",)  # types of devices from which there is anything to gain by moving to the host
MakeOptimizer = Callable[[Decoder, AdamWSettings, int], Optimizer]


async def inline(function: Callable[[], T], /) -> T:
    return function()


class NativeTrainer:
    """Trainer of one policy, with its critic and reference if there are any, on one device.

    It may be one of several ranks, see `ranks`."""

    def __init__(
        self,
        decoder: Decoder,
        settings: AdamWSettings,
        *,
        steps: int,
        reference: Reference | None = None,
        critic: Critic | None = None,
        scores: bool = False,
        sender: Sender | LiveSender | None = None,
        source: str | Path | None = None,
        offload: Offload = inline,
        process: str = "trainer",
        cores: Cores | None = None,
        threads: int = 1,
        checkpoints: bool = True,
        ranks: Ranks | None = None,
        optimizer: MakeOptimizer = Optimizer,
        lora: AdapterConfig | None = None,
        adapter_alone: bool = False,
        policy: str = "policy",
        recorder: Recorder | None = None,
        seed: int = 0,
    ) -> None:
        """Move the decoder to the device and prepare training. Raises ValueError for 16-bit weights.

        steps: optimizer updates in all, for the schedule. reference: another policy, for `forward`. critic: trained beside
        the policy. scores: export the critic instead of the policy. sender: transport of published weights. source: model
        folder whose tokenizer and configuration go into exports and checkpoints. cores: taken before each micro-batch.
        threads: number of threads on a CPU that may run micro-batches of their own. checkpoints: reserve the memory of a
        snapshot now, so that a lack of memory shows before training. ranks: that share the weights and the rows; every one
        is given all calls, each with its own rows. optimizer: makes the policy's from model, settings and `steps`. lora: of
        the adapter that the decoder has, which alone is trained, saved and exported beside the merged weights.
        adapter_alone: publish it, not the merged weights. policy: the name of what it trains. recorder: of this process's
        time, which several trainers may share. seed: of the run, for the masks of the adapter's dropout."""
        self.settings, self.device, self._ranks = settings, resolve_device(settings.device), ranks or Ranks()
        self.decoder = _placed(decoder, self.device, settings)
        self._reference = reference and reference.beside(self.decoder)
        self._critic = critic and critic.beside(self.decoder)
        self._ranks.shard(self.decoder, *(each for part in (self._reference, self._critic) if part for each in part.modules))
        self._optimizer = optimizer(self.decoder, settings, steps)
        trained = self._optimizer.named | (self._critic.parameters if self._critic is not None else {})
        self._sums = self._ranks.replica_sums(trained, settings.reduce)
        self._exports = self._critic.model if self._critic is not None and scores else None
        self._kept = [each for each in (self._reference, self._critic) if each is not None]
        self._optimized = [each for each in (self._optimizer, self._critic) if each is not None]
        self._compute = _compute(settings, self.device, self._ranks, threads, cores)
        of_critic = self._critic and self._critic.adapted
        self._adapter = lora and TrainedAdapter.of(lora, self.decoder, self._ranks, settings.serving_dtype, of_critic)
        self._source = None if source is None else Path(source)
        published = self.decoder, self._ranks, settings.serving_dtype, process, self._adapter if adapter_alone else None
        self._publication = None if sender is None else Publication(sender, *published)
        self._policy, self._offload, self._recorder = policy, offload, recorder or Recorder(process)
        self._seed = derive_seed(seed, policy)
        copied = self.decoder, self._optimizer, self._kept, self._ranks, self._sums
        self._room = Snapshot.room(*copied) if checkpoints else None  # memory for the next snapshot
        self._snapshot: Snapshot | None = None
        self._copying: asyncio.Future[None] | None = None  # copy of the snapshot, beside calls that read the weights
        self._steady = asyncio.Lock()  # bounded: held for an update, or for a transfer with its limit
        self._applied: Metrics = {}  # metrics of the optimizer's latest update

    @property
    def updates(self) -> int:
        """The number of optimizer updates done."""
        return self._optimizer.done

    async def forward(self, samples: list[Sample], policy: str = "policy") -> list[Array]:
        """Logprobs by `policy` ("policy", "reference"), or values ("critic"): [T] float32 each."""
        others = {
            "policy": self.decoder,
            "reference": self._reference and self._reference.decoder,
            "critic": self._critic and self._critic.model,
        }
        model = others.get(policy)
        if model is None:
            known = ", ".join(name for name, each in others.items() if each is not None)
            raise ValueError(f"forward(policy={policy!r}): this trainer was built without a {policy}; it has {known}")

        def run() -> list[Array]:
            with self._reference.computing() if policy == "reference" and self._reference else nullcontext():
                return training_pass.forward(model, samples, self._compute)

        return await self._do("forward", run, samples=len(samples))

    async def forward_backward(self, samples: list[Sample], losses: dict[str, LossSpec]) -> TrainResult:
        """Add the gradient of these samples; returns metrics as sums, and logprobs.

        Raises ValueError for a sample of another policy than the one that this trainer trains.
        """
        self._expect_own(*{sample.policy for sample in samples})

        def run() -> TrainResult:
            self._come_back()  # gradients are added to what there is
            critic, at_peak = self._critic and self._critic.model, self._recorder.memory.update
            drops = self._adapter is not None and self._adapter.config.dropout > 0
            how = at_peak, critic, Dropout(self._seed, self.updates) if drops else None
            result = training_pass.forward_backward(self.decoder, samples, losses, self._compute, *how)
            self._recorder.count("trained_tokens", result.metrics["tokens"])
            self._recorder.count("trained_samples", len(samples))
            return result

        return await self._do("train", run, self.updates, samples=len(samples))

    async def check(self, scale: float) -> None:
        """Raise TrainingDiverged, and free the policy's gradient, when `scale` times it is not finite."""
        await self._do("apply", lambda: self._optimizer.norm(scale))

    async def apply(self, scale: float) -> Metrics:
        """Take one optimizer step with `scale` times the gradient, for policy and critic; returns metrics.

        Raises TrainingDiverged, and takes no step, when a gradient is not finite.
        """

        def run() -> Metrics:
            self._recorder.count("reduced_bytes", self._sums.add_up(scale))
            if self._critic is not None:
                self._critic.check(scale)
            self._applied = self._optimizer.apply(scale)
            if self._critic is not None:
                self._applied |= self._critic.apply(scale)
            if self._reference is not None:
                self._reference.follow(self.decoder, self.updates)
            self._recorder.count("updates", 1)
            return self._applied

        if self._copying is not None:
            with self._recorder.span("snapshot"):
                await self._copied()
        async with self._steady:
            return await self._do("apply", run, self.updates)

    async def publish(self, version: Version, full: bool = False) -> WeightUpdate:
        """Send the weights to the engines as `version`; returns where they are.

        full: see `interfaces.Trainer`. Raises PolicyMismatch, and nothing becomes visible, for other names or shapes than
        this model's.
        """
        publication = self._publication
        if publication is None:
            raise ValueError("this trainer was built without a sender: it cannot publish weights")
        self._expect_own(version.policy)

        def run() -> WeightUpdate:
            again = publication.publish_again
            published = again(version) if full else publication.publish(version, self.updates, self._applied)
            self._recorder.count("published_bytes", published.bytes)
            self._recorder.count("published_whole_bytes", published.whole)
            return published

        async with self._steady:  # a copy that is being sent does not change
            return await self._do("publish", run, version.step, step=version.step)

    async def send(self, update: WeightUpdate) -> str:
        """Send the live update that was published last, in a thread: gradients may be computed meanwhile, updates wait."""
        publication, stop, step = self._publication, threading.Event(), update.version.step
        if publication is None or not publication.live:
            raise ValueError("this trainer's transport sends nothing later: it has written the weights already")

        def run() -> str:
            fault_injection.reach(self._recorder.process, "send", step)
            with self._recorder.span("send", step=step):
                try:
                    publication.send_offered(update, stop)
                except TransferFailed as error:
                    return str(error)
            self._recorder.count("sent_updates", 1)
            return ""

        async with self._steady:
            publication.expect_sendable(update, self.updates)
            return await in_thread(run, stop=stop)

    async def snapshot(self) -> None:
        """Take a snapshot for `save`, copied beside the next gradient; the next update waits for the copy."""

        def run() -> Snapshot:
            room, self._snapshot, self._room = self._snapshot or self._room, None, None  # the first: it was never saved
            return Snapshot.take(self.decoder, self._optimizer, self._kept, room, self._ranks, self._sums)

        await self._copied()
        self._snapshot = await self._do("snapshot", run, self.updates)
        self._copying = asyncio.get_running_loop().run_in_executor(None, self._snapshot.copy)

    async def _copied(self) -> None:
        """Wait for the copy of the latest snapshot; before its end, weights must not change nor be written."""
        if (copying := self._copying) is not None:
            await asyncio.wait({copying})  # bounded: by the copy, which is as fast as memory is
            copying.result()
            if self._copying is copying:  # otherwise another waiting call has begun the next copy
                self._copying = None

    async def save(self, folder: str) -> None:
        """Write the latest snapshot to `folder`. Raises CheckpointError without one."""
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is None:
            raise CheckpointError(f"{folder}: there is no snapshot to write; save() comes after snapshot(), once")
        await self._copied()

        def wrote(file: Path) -> None:
            self._recorder.count("saved_files", 1)
            phase = "save-optimizer" if file.name.startswith("optimizer") else "save"
            fault_injection.reach(self._recorder.process, phase, snapshot.updates, path=file)

        def run() -> None:
            with self._recorder.span("save"):
                snapshot.write(Path(folder), self._source, wrote, self._adapter)
            self._room = snapshot

        await asyncio.to_thread(run)  # bounded: by the disk; a caller in another process has its deadline

    async def load(self, folder: str) -> None:
        """Restore the trainer from `folder`. Raises CheckpointError, and changes nothing, if it does not fit."""
        await self.restore(await self.checked(folder))

    async def checked(self, folder: str) -> Restore:
        """Read and check what `save` wrote to `folder`, for `restore`. Raises CheckpointError if it does not fit."""
        whole = self.decoder, self._optimizer, self._kept, self._sums, self._adapter
        return await self._do("load", lambda: read_checkpoint(Path(folder), *whole))

    async def restore(self, restore: Restore) -> None:
        """Go on from what `checked` returned."""
        await self._copied()
        async with self._steady:
            await self._do("load", restore)
        if self._publication is not None:
            self._publication.forget()

    async def export(self, folder: str) -> None:
        """Write the policy (or the critic) to `folder` as a Hugging Face model; the first of several ranks writes it."""
        to = Path(folder), self._source, DTYPES[self.settings.serving_dtype], self._ranks.rank == 0
        to, scored = (*to, self._adapter and self._adapter.config), self._exports
        policy = partial(export_policy, self.decoder, *to)
        await self._do("export", policy if scored is None else partial(export_scored, scored, *to))

    async def sleep(self) -> None:
        """Move moments and gradients to the host's memory, and give back what is free on the device."""

        def run() -> None:
            if self.device.type in LEAVES:
                for each in self._optimized:
                    each.leave(self.device)
            give_back(self.device)

        await self._copied()
        await self._do("sleep", run)

    async def wake(self) -> None:
        await self._do("wake", self._come_back)

    def _come_back(self) -> None:
        for each in self._optimized:
            each.come_back()

    async def _do(self, name: str, work: Callable[[], T], fault: int | None = None, **args: float) -> T:
        """Do blocking work on the process's cores, in a span. fault: the step of an injected fault."""

        def run() -> T:
            self._compute.lanes.cores.take()
            try:
                if fault is not None:
                    fault_injection.reach(self._recorder.process, name, fault)
                with self._recorder.span(name, **args):
                    return work()
            finally:
                self._compute.lanes.cores.leave()

        return await self._recorder.asked(self._offload, run)

    def _expect_own(self, *policies: str) -> None:
        """Raise ValueError unless these are the one policy that this trainer holds."""
        if other := next((policy for policy in policies if policy != self._policy), None):
            raise ValueError(f"the policy {other!r}: this trainer trains {self._policy!r} only")

    def progress(self) -> float:
        done = self._recorder.counters
        return self._compute.lanes.begun + done.get("updates", 0.0) + done.get("saved_files", 0.0)

    async def telemetry(self) -> Telemetry:
        return self._recorder.drain()

    async def close(self) -> None:
        """Close the transport, and free the memory of gradients and snapshot."""
        if self._copying is not None:
            await asyncio.wait({self._copying})  # bounded: as in `_copied`
        for each in self._optimized:
            each.forget()
        self._snapshot = self._room = None
        self._ranks.close()
        if self._publication is not None:
            self._publication.close()


def _placed(decoder: Decoder, device: torch.device, settings: AdamWSettings) -> Decoder:
    """Move float32 weights to the device. Raises ValueError for 16-bit ones."""
    for name, parameter in decoder.named_parameters():
        if parameter.dtype in (torch.float16, torch.bfloat16):
            raise ValueError(f"{name} is {parameter.dtype}: the trainer keeps float32 weights; load the model in float32")
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # kernels are launched on the current device
    if device.type == "cuda" and settings.dtype == "bfloat16" and not MIXES:
        # The head is computed in float32, which a device multiplies ten times more slowly than TF32. Its inputs have
        # the eight bits of bfloat16, or are rounded to them when served; TF32 keeps eleven.
        torch.set_float32_matmul_precision("high")
    return decoder.to(device)


def _compute(
    settings: AdamWSettings, device: torch.device, ranks: Ranks, threads: int, cores: Cores | None
) -> training_pass.Compute:
    """The settings of a pass over micro-batches."""
    lanes = Lanes(threads if device.type == "cpu" and ranks.size == 1 else 1, cores)
    narrow = torch.bfloat16 if settings.dtype == "bfloat16" else None
    room, checkpointing = settings.micro_batch_tokens, settings.checkpointing
    return training_pass.Compute(device, room, narrow, checkpointing, lanes=lanes, ranks=ranks)


def resolve_device(name: str) -> torch.device:
    """The device of this name; "auto" prefers CUDA. Raises ValueError when it is missing."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device {name!r}: expected 'auto', 'cpu', 'cuda' or 'cuda:N'") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r}: no CUDA device is visible here; use 'auto' or 'cpu'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {name!r}: there are {torch.cuda.device_count()} CUDA devices here, counted from 0")
    return device
