"""Bytes and time of deltas after real optimizer steps, by learning rate, and 200 of them to the last bit.

    python benchmarks/delta.py [--model 25m] [--steps 12] [--warm 8] [--rates 1e-6 1e-5 1e-4]
    python benchmarks/delta.py --bits [--model 2m]

AdamW steps on float32 weights that are served in bfloat16, with the gradient of a cross-entropy on random rows. The first
`--warm` steps fill its moments. Per step: the share of values that changed, bytes of the places and of the new values before
zstd and of what travels after it, each as a share of a full version, and the time of a core to pack and to apply them.

`--bits` sends 200 versions through the transports, with lost, repeated and reordered messages, and compares what was rebuilt
with a full version of each step, bit by bit. Prints tables; the first form writes `results/delta.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import save, table
from torch import Tensor

from tidemill.core.errors import BaseMissing, WeightsMoved
from tidemill.core.types import LossSpec, Sample, Version
from tidemill.models.decoder import Decoder
from tidemill.models.fingerprint import fingerprint
from tidemill.models.hf_weights import serving_slices
from tidemill.models.new_model import SIZES, architecture
from tidemill.models.weight_slices import Slice, whole_tensors
from tidemill.trainer.native_trainer import NativeTrainer
from tidemill.trainer.trainer_kinds import TrainerSettings
from tidemill.weight_sync.delta_coding import pack, unpack
from tidemill.weight_sync.sync_settings import SyncSettings
from tidemill.weight_sync.transport import make_receiver, make_sender

VOCAB, STEPS = 64, 200
STORED = ("shared_memory", "checkpoint")
Bits = dict[str, Tensor]


def trainer_of(model: str, lr: float, sender: Any = None) -> NativeTrainer:
    decoder = Decoder(architecture(SIZES[model], vocab=VOCAB, context=512, ends={}))
    decoder.initialise(torch.Generator().manual_seed(0))
    settings = TrainerSettings(device="cpu", serving_dtype="bfloat16", lr=lr)
    return NativeTrainer(decoder, settings, steps=10**6, sender=sender, checkpoints=False)


def rows(step: int) -> list[Sample]:
    rng, found = np.random.default_rng(step), list[Sample]()
    for length in (48, 64):
        tokens, nothing = rng.integers(0, VOCAB, length).astype(np.int32), np.zeros(length, np.float32)
        weights = (np.arange(length) > 0).astype(np.float32) / 100
        found.append(Sample(tokens, nothing > 0, nothing, tokens * 0 - 1, nothing, weights))
    return found


async def stepped(trainer: NativeTrainer, step: int) -> None:
    await trainer.forward_backward(rows(step), {"policy": LossSpec("cross_entropy")})
    await trainer.apply(1.0)


def served(trainer: NativeTrainer) -> Bits:
    """Copies of what is served, as integers."""
    found = ((s.name, s.tensor.clone()) for s in serving_slices(trainer.decoder, torch.bfloat16))
    return {name: tensor.view(torch.int16) for name, tensor in found}


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.thread_time()  # of this thread's core, whatever else the machine does
    result = work()
    return time.thread_time() - begin, result


def compared(old: Bits, new: Bits) -> dict[str, float]:
    """One step's figures, of all tensors together."""
    total = dict.fromkeys(("values", "changed", "full", "raw", "sent", "pack", "apply"), 0.0)
    for name, after in new.items():
        before = old[name]
        count, changed = after.numel(), int((before != after).sum())
        seconds, packed = timed(lambda b=before, a=after: pack(b, a))
        total["pack"] += seconds
        total["sent"] += after.nbytes if packed is None else len(packed)
        total["raw"] += min(after.nbytes, changed * 2 + min(changed, -(-count // 8)))  # a byte for each place, or a bit
        for key, value in (("values", count), ("changed", changed), ("full", after.nbytes)):
            total[key] += value
        if packed:
            rebuilt = before.clone()
            total["apply"] += timed(lambda p=packed, t=rebuilt: applied(p, t))[0]
            assert torch.equal(rebuilt, after)
    mb = total["full"] / 1e6
    return {
        "values changed %": 100 * total["changed"] / total["values"],
        "before zstd %": 100 * total["raw"] / total["full"],
        "sent %": 100 * total["sent"] / total["full"],
        "MB full": mb,
        "MB sent": total["sent"] / 1e6,
        "pack ms/MB": 1e3 * total["pack"] / mb,
        "apply ms/MB": 1e3 * total["apply"] / mb,
    }


def applied(packed: bytes, tensor: Tensor) -> None:
    for run, change in unpack(torch.frombuffer(bytearray(packed), dtype=torch.uint8), tuple(tensor.shape), tensor.dtype):
        change.apply(tensor[run])


async def measured(model: str, lr: float, warm: int, steps: int) -> dict[str, Any]:
    trainer = trainer_of(model, lr)
    found, old = list[dict[str, float]](), Bits()
    for step in range(warm + steps):
        await stepped(trainer, step)
        if step >= warm - 1:
            new = served(trainer)
            if old:
                found.append(compared(old, new))
            old = new
    await trainer.close()
    return {"lr": f"{lr:g}"} | {key: statistics.median(each[key] for each in found) for key in found[0]}


class Peer:
    """What an engine does with an update: nothing is taken that has not its fingerprint."""

    def __init__(self, transport: str) -> None:
        self.receiver, self.version, self.tensors = make_receiver(transport), Version(-1), dict[str, Tensor]()

    def update(self, update: Any) -> None:
        if update.base not in (None, self.version):
            raise BaseMissing(f"{update.base} is not {self.version}")
        staged = whole_tensors(self.receiver.receive(update))
        assert fingerprint(Slice.whole(*each) for each in staged.items()) == update.version.fingerprint
        self.version, self.tensors = update.version, staged


async def to_the_bit(model: str, transport: str, lr: float, folder: Path) -> dict[str, Any]:
    """Send 200 versions as deltas, and as full ones beside them, with faults of messages."""
    trainer = trainer_of(model, lr, make_sender(SyncSettings(transport=transport, full_every=20), folder))  # pyright: ignore
    full_sender, full = make_sender(SyncSettings(), folder / "full"), Peer("shared_memory")
    peer, chance = Peer(transport), random.Random(0)
    counts = dict.fromkeys(("versions", "deltas", "dropped", "repeated", "reordered", "noticed"), 0)

    async def bring(update: Any) -> None:
        try:
            peer.update(update)
        except BaseMissing:
            counts["noticed"] += 1
            try:
                peer.update(await trainer.publish(update.version, full=True))
            except WeightsMoved:
                return  # an old message: the trainer is further

    late = None
    while counts["versions"] < STEPS:
        await stepped(trainer, counts["versions"])
        counts["versions"] += 1
        update = await trainer.publish(Version(counts["versions"]))
        full.update(full_sender.send(update.version, serving_slices(trainer.decoder, torch.bfloat16)))  # pyright: ignore
        counts["deltas"] += update.kind == "delta"
        fault = chance.choice(("none",) * 7 + ("dropped", "repeated", "reordered"))
        if fault in ("dropped", "reordered") and counts["versions"] < STEPS:
            counts[fault] += 1
            late = update if fault == "reordered" else late
            continue
        await bring(update)
        if fault == "repeated":
            counts[fault] += 1
            await bring(update)
        if late is not None and late.kind == "delta":
            await bring(late)  # after the one that followed it
        late = None
        for name, tensor in full.tensors.items():
            assert torch.equal(peer.tensors[name].view(torch.int16), tensor.view(torch.int16)), name
    await trainer.close()
    return {"transport": transport, "lr": f"{lr:g}", **counts, "equal": "every version that arrived"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=SIZES, help="25m, and 2m with --bits")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warm", type=int, default=8)
    parser.add_argument("--bits", action="store_true")
    args = parser.parse_args()
    if args.bits:
        found = list[dict[str, Any]]()
        for transport in STORED:
            with tempfile.TemporaryDirectory() as folder:
                found.append(asyncio.run(to_the_bit(args.model or "2m", transport, args.rates[-1], Path(folder))))
        print(table(found))
        return
    found = [asyncio.run(measured(args.model or "25m", lr, args.warm, args.steps)) for lr in args.rates]
    print(table(found))
    print(f"written to {save('delta', {'rates': found}, {'torch': torch.__version__})}")


if __name__ == "__main__":
    main()
