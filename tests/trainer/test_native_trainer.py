import asyncio
import json
import os
import resource
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from trainer_cases import LOSSES, batch, decoder

from tidemill.core.errors import CheckpointError, TrainingDiverged
from tidemill.core.interfaces import Trainer
from tidemill.core.types import Version
from tidemill.core.weight_update import WeightPart, WeightUpdate
from tidemill.models.fingerprint import fingerprint
from tidemill.models.hf_weights import hf_views, load_folder, serving_slices
from tidemill.observability.timeline import HANDOVER, IDLE
from tidemill.trainer import trainer_checkpoint
from tidemill.trainer.native_trainer import NativeTrainer
from tidemill.trainer.trainer_kinds import TrainerSettings

SETTINGS = TrainerSettings(lr=0.01, warmup_steps=2, schedule="cosine", weight_decay=0.1, micro_batch_tokens=60, device="cpu")


def trainer(settings=SETTINGS, model=None, **more):
    return NativeTrainer(model or decoder(), settings, steps=4, **more)


async def one_step(t, seed):
    result = await t.forward_backward(batch(seed), LOSSES)
    return result, await t.apply(1 / 50)


async def save(t, folder):
    await t.snapshot()
    await t.save(str(folder))


def weights(t):
    return {name: view.clone() for name, view in hf_views(t.decoder)}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


async def test_it_is_a_trainer_and_learns():
    t = trainer()
    assert isinstance(t, Trainer)
    first, _ = await one_step(t, 0)
    for _ in range(3):
        last, metrics = await one_step(t, 0)
    assert last.metrics["loss"] < first.metrics["loss"] and metrics["grad_norm"] > 0


async def test_a_resumed_run_is_bit_for_bit_the_same(tmp_path):
    straight = trainer()
    for seed in range(2):
        await one_step(straight, seed)
    torch.manual_seed(5)
    torch.rand(3)
    await save(straight, tmp_path / "step-2")
    draws = torch.rand(4)
    resumed = trainer(model=decoder(seed=9))
    await resumed.load(str(tmp_path / "step-2"))
    assert torch.equal(torch.rand(4), draws)
    for seed in (2, 3):
        a, b = await one_step(straight, seed), await one_step(resumed, seed)
        assert a[0].metrics == b[0].metrics and a[1] == b[1]
        assert all((x == y).all() for x, y in zip(a[0].logprobs, b[0].logprobs, strict=True))
    assert equal(weights(straight), weights(resumed)) and resumed.updates == 4


async def test_a_gradient_in_the_making_is_no_part_of_what_is_loaded(tmp_path):
    t = trainer()
    await one_step(t, 0)
    await save(t, tmp_path / "c")
    await one_step(t, 1)
    expected = weights(t)
    await t.forward_backward(batch(7), LOSSES)
    await t.load(str(tmp_path / "c"))
    await one_step(t, 1)
    assert equal(weights(t), expected)


async def test_before_the_first_update_there_is_no_optimizer_state(tmp_path):
    t = trainer()
    await save(t, tmp_path / "c")
    other = trainer(model=decoder(seed=9))
    await one_step(other, 3)
    await other.load(str(tmp_path / "c"))
    await one_step(t, 0), await one_step(other, 0)
    assert equal(weights(t), weights(other))


def rewrite(file, change):
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


DAMAGE = {
    "no such folder": (lambda f: [p.unlink() for p in f.iterdir()], "not readable"),
    "state": (lambda f: (f / "trainer.json").write_text("{"), "trainer.json: not readable"),
    "format": (lambda f: (f / "trainer.json").write_text(json.dumps({"format": 99})), "format 99, expected 1"),
    "updates": (lambda f: (f / "trainer.json").write_text(json.dumps({"format": 1, "updates": -3})), "updates = -3"),
    "truncated": (lambda f: os.truncate(f / "optimizer.safetensors", 200), "optimizer.safetensors: not readable"),
    "weights": (lambda f: os.truncate(f / "model.safetensors", 200), "its safetensors have 200 bytes"),
    "torn weights": (lambda f: os.truncate(f / "model.safetensors", 9000), "model.safetensors is not a readable"),
    "missing": (
        lambda f: rewrite(f / "optimizer.safetensors", lambda t: t.pop("exp_avg.norm.weight")),
        "1 tensors are missing, among them exp_avg.norm.weight",
    ),
    "surplus": (
        lambda f: rewrite(f / "optimizer.safetensors", lambda t: t.update(x=torch.zeros(1))),
        "do not belong here, among them x",
    ),
    "shape": (
        lambda f: rewrite(f / "optimizer.safetensors", lambda t: t.update({"exp_avg.norm.weight": torch.zeros(3)})),
        r"\(3,\) torch.float32, this trainer has \(16,\)",
    ),
    "random": (lambda f: rewrite(f / "optimizer.safetensors", lambda t: t.pop("random.cpu")), "random state is missing"),
}


@pytest.mark.parametrize("damage", DAMAGE)
async def test_a_checkpoint_that_does_not_fit_leaves_the_trainer_as_it_was(tmp_path, damage):
    change, message = DAMAGE[damage]
    t = trainer()
    await one_step(t, 0)
    await save(t, tmp_path / "c")
    await one_step(t, 1)
    before = weights(t)
    change(tmp_path / "c")
    with pytest.raises(CheckpointError, match=message):
        await t.load(str(tmp_path / "c"))
    assert equal(weights(t), before) and t.updates == 2


async def test_another_models_checkpoint_is_refused(tmp_path):
    other = trainer(model=decoder(intermediate_size=32))
    await save(other, tmp_path / "c")
    with pytest.raises(CheckpointError, match="another model than the one being trained: intermediate differ"):
        await trainer().load(str(tmp_path / "c"))


async def test_saving_needs_a_snapshot_and_a_folder_of_its_own(tmp_path):
    t = trainer()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="no snapshot to write"):
        await t.save(str(tmp_path / "c"))
    with pytest.raises(CheckpointError, match=r"notes: .*exists"):
        await save(t, tmp_path / "notes")
    with pytest.raises(CheckpointError, match="no snapshot to write"):  # its memory was given back
        await t.save(str(tmp_path / "c"))
    assert [p.name for p in tmp_path.rglob("*")] == ["notes", "thesis.txt"]


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "config.json"])
async def test_a_write_that_the_system_cuts_off_is_an_error_that_names_it(tmp_path, file):
    """A limit on the size of files, one byte below this file's: a real write comes to a real end, as on a full disk."""
    t = trainer()
    await one_step(t, 0)
    await save(t, tmp_path / "whole")
    size = (tmp_path / "whole" / file).stat().st_size
    await t.snapshot()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, hard))
    try:
        with pytest.raises(CheckpointError, match=r"cut: .*File too large"):
            await t.save(str(tmp_path / "cut"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    await save(t, tmp_path / "again")  # and the trainer goes on


async def test_what_is_written_is_the_moment_of_the_snapshot_whatever_is_trained_meanwhile(tmp_path, monkeypatch):
    """Two further steps, one of them before the write begins and one while it goes on, change nothing of it."""
    straight, other = trainer(), trainer()
    for t in (straight, other):
        await one_step(t, 0)
        torch.manual_seed(11)
        torch.rand(3)
        await t.snapshot()
    await straight.save(str(tmp_path / "at-once"))
    torch.rand(5)
    await one_step(other, 1)
    half, go_on, real = threading.Event(), threading.Event(), trainer_checkpoint.save_file

    def slow(*args, **kwargs):
        half.set()
        assert go_on.wait(20)
        real(*args, **kwargs)

    monkeypatch.setattr(trainer_checkpoint, "save_file", slow)
    writing = asyncio.create_task(other.save(str(tmp_path / "late")))
    assert await asyncio.to_thread(half.wait, 20), "the write had begun"
    await one_step(other, 2)
    await other.snapshot()  # nor does the next one, whose memory is not that of one which is being written
    assert other.updates == 3 and not writing.done()
    go_on.set()
    await writing
    names = sorted(p.name for p in (tmp_path / "at-once").iterdir())
    assert names == sorted(p.name for p in (tmp_path / "late").iterdir()) and "optimizer.safetensors" in names
    for name in names:
        assert (tmp_path / "late" / name).read_bytes() == (tmp_path / "at-once" / name).read_bytes(), name
    resumed = trainer(model=decoder(seed=9))
    await resumed.load(str(tmp_path / "late"))
    for seed in (1, 2):
        await one_step(resumed, seed)
    assert equal(weights(resumed), weights(other))


async def held_up(t, monkeypatch):
    """Take a snapshot of `t` whose copy begins when the event that this returns is set."""
    go_on, real = threading.Event(), trainer_checkpoint.Snapshot.copy

    def slow(snapshot):
        assert go_on.wait(20)
        real(snapshot)

    monkeypatch.setattr(trainer_checkpoint.Snapshot, "copy", slow)
    await t.snapshot()
    return go_on


@pytest.mark.parametrize("change", ["apply", "load"])
async def test_what_changes_a_trainer_waits_for_the_copy_of_it_and_a_gradient_does_not(tmp_path, monkeypatch, change):
    straight, t = trainer(), trainer()
    for each in (straight, t):
        await one_step(each, 0)
    await save(trainer(model=decoder(seed=9)), tmp_path / "other")
    torch.manual_seed(11)
    await save(straight, tmp_path / "straight")
    torch.manual_seed(11)
    go_on = await held_up(t, monkeypatch)
    await t.forward_backward(batch(1), LOSSES)
    before = weights(t)
    changing = asyncio.ensure_future(t.apply(1 / 50) if change == "apply" else t.load(str(tmp_path / "other")))
    writing = asyncio.ensure_future(t.save(str(tmp_path / "late")))
    await asyncio.wait({changing, writing}, timeout=0.05)
    assert not changing.done() and not writing.done() and equal(weights(t), before)
    go_on.set()
    await asyncio.gather(changing, writing)
    assert not equal(weights(t), before)
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (tmp_path / "late" / file).read_bytes() == (tmp_path / "straight" / file).read_bytes()
    waits = [span.name for span in (await t.telemetry()).spans if span.name == "snapshot"]
    assert len(waits) == 1 + (change == "apply")  # what training waited for is accounted for


async def test_a_wait_for_the_copy_that_is_given_up_leaves_it_to_others(tmp_path, monkeypatch):
    t = trainer()
    await one_step(t, 0)
    go_on = await held_up(t, monkeypatch)
    given_up = asyncio.ensure_future(t.apply(1.0))
    await asyncio.wait({given_up}, timeout=0.01)
    given_up.cancel()
    await asyncio.wait({given_up})
    go_on.set()
    await t.save(str(tmp_path / "c"))
    await one_step(t, 1)
    assert given_up.cancelled() and t.updates == 2


async def test_a_copy_that_fails_stops_the_next_update_and_is_never_written(tmp_path, monkeypatch):
    t = trainer()
    await one_step(t, 0)

    def fails(snapshot):
        raise MemoryError("no room")

    monkeypatch.setattr(trainer_checkpoint.Snapshot, "copy", fails)
    await t.snapshot()
    await t.forward_backward(batch(1), LOSSES)
    with pytest.raises(MemoryError, match="no room"):
        await t.apply(1 / 50)
    with pytest.raises(MemoryError, match="no room"):
        await t.save(str(tmp_path / "c"))
    assert t.updates == 1 and not (tmp_path / "c").exists()


async def test_a_snapshot_shares_no_memory_and_is_given_back():
    t = trainer()
    await one_step(t, 0)
    await t.snapshot()
    taken = t._snapshot
    live = {p.untyped_storage().data_ptr() for p in t.decoder.parameters()}
    live |= {m.tensor.untyped_storage().data_ptr() for m in t._optimizer.state()}
    copies = [block.tensor for block in [*taken.weights, *taken.optimizer]]
    assert not live & {c.untyped_storage().data_ptr() for c in copies}
    gone = threading.Event()
    watched = weakref.ref(copies[0], lambda _: gone.set())
    del taken, copies
    await t.close()
    assert gone.wait(30), watched()  # the thread that copied may be about to let go of it


async def test_room_for_a_snapshot_is_taken_at_once_only_where_one_is_written_beside_training(tmp_path):
    beside, last = trainer(), trainer(checkpoints=False)
    assert beside._room is not None and last._room is None
    for t, name in ((beside, "beside"), (last, "last")):
        await one_step(t, 0)
        await save(t, tmp_path / name)
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (tmp_path / "beside" / file).read_bytes() == (tmp_path / "last" / file).read_bytes()


async def test_a_snapshot_takes_the_memory_of_the_one_that_was_written(tmp_path):
    reusing, fresh = trainer(), trainer()
    await one_step(reusing, 0)
    await save(reusing, tmp_path / "first")
    first = {block.name: block.tensor.data_ptr() for block in reusing._room.optimizer}
    await one_step(reusing, 1)
    await save(reusing, tmp_path / "second")
    assert first and first.items() <= {block.name: block.tensor.data_ptr() for block in reusing._room.optimizer}.items()
    for seed in (0, 1):
        await one_step(fresh, seed)
    await save(fresh, tmp_path / "fresh")
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (tmp_path / "second" / file).read_bytes() == (tmp_path / "fresh" / file).read_bytes()


async def test_a_checkpoint_is_also_a_model_folder(tmp_path):
    t = trainer()
    await save(t, tmp_path / "c")
    await t.export(str(tmp_path / "final"))
    for folder in ("c", "final"):
        assert equal(dict(hf_views(load_folder(tmp_path / folder))), weights(t))
    assert not list(tmp_path.rglob("*.p*t")) and not list(tmp_path.rglob("*.bin"))


async def test_export_is_in_the_serving_dtype_with_the_tokenizer(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    t = trainer(SETTINGS.model_copy(update={"serving_dtype": "bfloat16"}), source=source)
    await t.export(str(tmp_path / "final"))
    assert {v.dtype for v in load_file(tmp_path / "final" / "model.safetensors").values()} == {torch.bfloat16}
    assert (tmp_path / "final" / "tokenizer.json").read_text() == "{}"


class Recording:
    """A transport that keeps what it was sent."""

    def __init__(self):
        self.sent, self.closed = {}, False

    def send(self, version, slices, onto=None):
        self.sent[version.step] = {s.name: s.tensor.clone() for s in slices}
        return WeightUpdate(version, (WeightPart("recording", "nowhere", 7),))

    def close(self):
        self.closed = True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_publish_sends_the_weights_of_now(dtype):
    sender = Recording()
    t = trainer(SETTINGS.model_copy(update={"serving_dtype": str(dtype).removeprefix("torch.")}), sender=sender)
    await t.publish(Version(0))
    await one_step(t, 0)
    published = await t.publish(Version(1))
    assert published.version == Version(1, fingerprint=fingerprint(serving_slices(t.decoder, dtype)))
    assert equal(sender.sent[1], {n: w.to(dtype) for n, w in weights(t).items()})
    assert not equal(sender.sent[0], sender.sent[1])
    await t.forward_backward(batch(), LOSSES)
    await t.close()
    assert sender.closed and all(p.grad is None for p in t.decoder.parameters())
    with pytest.raises(ValueError, match="without a sender"):
        await trainer().publish(Version(0))


async def test_another_policy_is_refused_before_it_changes_anything():
    t = trainer(sender=Recording())
    samples = batch()
    with pytest.raises(ValueError, match="the policy 'critic': this trainer trains 'policy' only"):
        await t.forward_backward([samples[0], replace(samples[1], policy="critic")], LOSSES)
    with pytest.raises(ValueError, match="'critic'"):
        await t.publish(Version(0, policy="critic"))
    assert all(p.grad is None for p in t.decoder.parameters())


async def test_forward_has_no_gradient_and_matches_training():
    t = trainer()
    seen = await t.forward(batch())
    assert all(p.grad is None for p in t.decoder.parameters())
    result = await t.forward_backward(batch(), LOSSES)
    for a, b in zip(seen, result.logprobs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


async def test_divergence_is_an_error_and_no_step():
    t = trainer()
    before = weights(t)
    samples = batch()
    policy = next(s for s in samples if s.loss == "policy" and s.advantages.any() and s.weights.any())
    policy.advantages = np.where(policy.mask, np.nan, 0).astype(np.float32)
    await t.forward_backward(samples, LOSSES)
    with pytest.raises(TrainingDiverged):
        await t.apply(1.0)
    assert equal(weights(t), before) and t.updates == 0


async def test_an_executor_keeps_the_event_loop_free():
    threads = set()
    with ThreadPoolExecutor(1) as pool:

        async def offload(function):
            def traced():
                threads.add(threading.current_thread())
                return function()

            return await asyncio.get_running_loop().run_in_executor(pool, traced)

        t = trainer(offload=offload)
        await one_step(t, 0)
    assert len(threads) == 1 and threading.main_thread() not in threads


async def test_telemetry_tells_what_happened_since_it_was_last_asked(tmp_path):
    t = trainer(sender=Recording(), process="trainer-0")
    result, _ = await one_step(t, 0)
    await t.publish(Version(1))
    await save(t, tmp_path / "c")
    first, second = await t.telemetry(), await t.telemetry()
    did = [s for s in first.spans if s.name not in (HANDOVER, IDLE)]
    assert [s.name for s in did] == ["train", "apply", "publish", "snapshot", "save"]
    assert {s.name for s in second.spans} == {IDLE} and all(s.start <= s.end for s in first.spans)
    assert did[0].end <= did[1].start
    assert first.counters == second.counters and first.counters["trained_tokens"] == result.metrics["tokens"]
    assert first.counters["updates"] == 1 and first.counters["published_bytes"] == 7
    assert (first.process, first.pid) == (
        "trainer-0",
        os.getpid(),
    ) and second.memory_bytes >= first.memory_bytes > 10_000_000


async def test_what_goes_on_while_telemetry_is_asked_for_is_told_of_until_then():
    """Else its share of the step would be missing there, and its end would be of the next one."""
    entered, go_on = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as pool:

        async def offload(function):
            def held():
                entered.set()
                assert go_on.wait(30)
                return function()

            return await asyncio.get_running_loop().run_in_executor(pool, held)

        t = trainer(offload=offload)
        under_way = asyncio.ensure_future(t.forward(batch()))
        await asyncio.to_thread(entered.wait)
        first = (await t.telemetry()).spans
        go_on.set()
        await under_way
        second = (await t.telemetry()).spans
    (before,), (after, *_) = ([s for s in spans if s.name == HANDOVER] for spans in (first, second))
    (done,) = (s for s in second if s.name == "forward")
    assert before.end == after.start and after.end <= done.start
    edges = sorted([*first, *second], key=lambda s: (s.start, s.end))
    assert all(b.start - a.end < 0.05 for a, b in pairwise(edges))  # no stretch is without a name


def test_weights_must_be_float32():
    with pytest.raises(ValueError, match="keeps float32 weights; load the model in float32"):
        trainer(model=decoder(torch.bfloat16))


@pytest.mark.parametrize(
    ("device", "message"), [("tpu-ish", "expected 'auto'"), ("cuda:99", "device 'cuda:99': (no CUDA device|there are)")]
)
def test_devices_that_are_not_there(device, message):
    with pytest.raises(ValueError, match=message):
        trainer(SETTINGS.model_copy(update={"device": device}))


async def test_a_supervised_warm_up_has_an_optimizer_of_its_own():
    model = decoder()
    rows = [s for s in batch() if s.loss == "supervised"]
    warm = NativeTrainer(model, TrainerSettings(lr=0.01, device="cpu"), steps=20)
    losses = [((await warm.forward_backward(rows, LOSSES)).metrics["loss"], await warm.apply(1 / 9))[0] for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0]
    t = trainer(model=model)
    assert t.decoder is model and t.updates == 0


@pytest.fixture
def as_before():
    """The precision of products belongs to the whole process, and a trainer on a device sets it."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.gpu
@pytest.mark.usefixtures("as_before")
async def test_train_save_and_resume_on_cuda(tmp_path):
    cuda = SETTINGS.model_copy(update={"device": "cuda", "dtype": "bfloat16"})
    t = trainer(cuda)
    await one_step(t, 0)
    await save(t, tmp_path / "c")
    other = trainer(cuda, model=decoder(seed=9))
    await other.load(str(tmp_path / "c"))
    assert equal(weights(t), weights(other))
    a, b = await one_step(t, 1), await one_step(other, 1)
    assert a[1]["grad_norm"] == pytest.approx(b[1]["grad_norm"], rel=1e-2)
