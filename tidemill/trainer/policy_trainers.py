"""PolicyTrainers: the Trainer protocol over several policies, adapters on one frozen base or whole models.

    rows -> the trainer of each row's policy -> results in the order of the rows
    apply: the policies with a gradient      publish, send: by the version's policy      save, load, export: FOLDER/POLICY

Each policy has a `NativeTrainer`, which computes what it would alone: optimizer, schedule, clipping, sender and checkpoint
are its own. The frozen weights under adapters, the thread for blocking work and the record of time are common to all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping
from copy import deepcopy
from pathlib import Path

from tidemill.core.atomic_files import whole_folder
from tidemill.core.errors import TrainingDiverged
from tidemill.core.types import Array, LossSpec, Metrics, Sample, Telemetry, TrainResult, Version
from tidemill.core.weight_update import WeightUpdate
from tidemill.models.decoder import Decoder
from tidemill.models.lora import has_adapter
from tidemill.models.quantised_base import bases
from tidemill.models.served_linear import Linear
from tidemill.trainer.native_trainer import NativeTrainer
from tidemill.trainer.telemetry import Recorder


def sharing(base: Decoder) -> Decoder:
    """A decoder with the same frozen weights, which are in memory once. An adapter that it gets is its own."""
    assert not has_adapter(base), "an adapter would be shared, too"
    base.requires_grad_(False)
    linears = (module for module in base.modules() if isinstance(module, Linear))
    shared = [base.arch, *base.parameters(), *bases(base), *(each.weight for each in linears)]
    return deepcopy(base, {id(each): each for each in shared})


class PolicyTrainers:
    """Trainer of several policies: adapters on one base, or whole models."""

    def __init__(self, trainers: Mapping[str, NativeTrainer], recorder: Recorder) -> None:
        """trainers: by policy; the first one has the reference. recorder: that all of them were given."""
        self.trainers, self._recorder = dict(trainers), recorder
        self._first = next(iter(self.trainers))
        self._moved = set[str]()  # policies with a gradient since their latest update

    async def forward(self, samples: list[Sample], policy: str = "policy") -> list[Array]:
        """Logprobs of each sample, [T] float32: by its own policy, or by the "reference"."""
        if policy != "policy":  # the same for all
            return await self.trainers[self._first].forward(samples, policy)
        found = dict[int, Array]()
        for name, where in self._parts(samples).items():
            found |= zip(where, await self.trainers[name].forward([samples[i] for i in where]), strict=True)
        return [found[i] for i in range(len(samples))]

    async def forward_backward(self, samples: list[Sample], losses: dict[str, LossSpec]) -> TrainResult:
        """Add the gradient of each sample to its own policy; returns metrics as sums over all, and logprobs.

        Raises ValueError, and adds none, for a sample of a policy that is not trained here.
        """
        metrics, logprobs, drops = Metrics(), dict[int, Array](), False
        for name, where in (self._parts(samples) or {self._first: []}).items():
            if where:
                self._moved.add(name)
            result = await self.trainers[name].forward_backward([samples[i] for i in where], losses)
            logprobs |= zip(where, result.logprobs, strict=True)
            drops |= result.drops
            for key, value in result.metrics.items():
                metrics[key] = metrics.get(key, 0.0) + value
        return TrainResult(metrics, [logprobs[i] for i in range(len(samples))], drops)

    async def apply(self, scale: float) -> Metrics:
        """Take one optimizer step for each policy that has a gradient since its latest one.

        Returns the metrics of each as POLICY/KEY, and as KEY the greatest. Raises TrainingDiverged, and takes no step, when
        a gradient is not finite.
        """
        moved = {name: each for name, each in self.trainers.items() if name in self._moved}
        for name, each in moved.items():
            try:
                await each.check(scale)
            except TrainingDiverged as error:
                raise TrainingDiverged(f"of the policy {name!r}, {error}") from None
        greatest, own = Metrics(), Metrics()
        for name, each in moved.items():
            applied = await each.apply(scale)
            self._moved.discard(name)
            own |= {f"{name}/{key}": value for key, value in applied.items()}
            greatest |= {key: max(value, greatest.get(key, value)) for key, value in applied.items()}
        return greatest | own

    async def publish(self, version: Version, full: bool = False) -> WeightUpdate:
        """Send the weights of the version's policy: see `NativeTrainer.publish`."""
        return await self._of(version.policy).publish(version, full)

    async def send(self, update: WeightUpdate) -> str:
        """Send the live update of its policy that was published last: see `NativeTrainer.send`."""
        return await self._of(update.version.policy).send(update)

    async def snapshot(self) -> None:
        """Take a snapshot of every policy, for `save`."""
        for each in self.trainers.values():
            await each.snapshot()

    async def save(self, folder: str) -> None:
        """Write the latest snapshot to a folder for each policy in `folder`. Raises CheckpointError without one."""
        await _all(each.save(f"{folder}/{name}") for name, each in self.trainers.items())

    async def load(self, folder: str) -> None:
        """Restore all policies from `folder`. Raises CheckpointError, and changes nothing, if one does not fit."""
        found = [(each, await each.checked(f"{folder}/{name}")) for name, each in self.trainers.items()]
        for each, restore in found:
            await each.restore(restore)
        self._moved.clear()

    async def export(self, folder: str) -> None:
        """Write each policy in `folder`: to POLICY as a Hugging Face model, and its adapter to POLICY-adapter.

        All of it takes the place of an earlier folder at once.
        """
        with whole_folder(Path(folder)) as partial:
            for name, each in self.trainers.items():
                await each.export(f"{partial}/{name}")

    async def sleep(self) -> None:
        for each in self.trainers.values():
            await each.sleep()

    async def wake(self) -> None:
        for each in self.trainers.values():
            await each.wake()

    def progress(self) -> float:
        return sum(each.progress() for each in self.trainers.values())

    async def telemetry(self) -> Telemetry:
        return self._recorder.drain()

    async def close(self) -> None:
        """Close all transports, and free the memory of gradients and snapshots."""
        await _all(each.close() for each in self.trainers.values())

    def _of(self, policy: str) -> NativeTrainer:
        """The trainer of a policy. Raises ValueError if it is none of those trained here."""
        if policy not in self.trainers:
            raise ValueError(f"the policy {policy!r}: this trainer trains {', '.join(map(repr, self.trainers))} only")
        return self.trainers[policy]

    def _parts(self, samples: list[Sample]) -> dict[str, list[int]]:
        """Indices of the samples of each policy that has some. Raises ValueError as `_of` does."""
        for policy in {sample.policy for sample in samples}:
            self._of(policy)
        parts = {name: [i for i, sample in enumerate(samples) if sample.policy == name] for name in self.trainers}
        return {name: where for name, where in parts.items() if where}


async def _all(works: Iterable[Awaitable[None]]) -> None:
    """Await all at once, each to its end. Raises the first failure then."""
    for result in await asyncio.gather(*works, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
