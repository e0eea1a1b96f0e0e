"""Staging in turns with an engine's steps: how long a turn is, and that nothing comes of it but what was published."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import BASE, MemoryReceiver, decoder, engine, prompts

from tidemill.core.errors import EngineFailed, PolicyMismatch
from tidemill.core.types import Completion, GenerateRequest, SamplingParams, Version
from tidemill.core.weight_update import WeightUpdate
from tidemill.engine.native import weight_updates
from tidemill.engine.native.native_engine import NativeEngine
from tidemill.engine.native.staged_weights import Staging, serve
from tidemill.engine.native.weight_updates import SHARE, TURN_S, in_turns
from tidemill.models import fingerprint, piecewise, served_linear, served_weights
from tidemill.models.decoder import Decoder
from tidemill.models.hf_weights import serving_slices
from tidemill.models.piecewise import Work, at_once, by_rows
from tidemill.models.served_weights import Contents, checked
from tidemill.models.weight_slices import Slice
from tidemill.weight_sync.sync_settings import SyncSettings
from tidemill.weight_sync.transport import make_receiver, make_sender

MS = 0.001
ARCH = replace(BASE, context=400)
PARAMS = SamplingParams(max_tokens=300, ignore_eos=True, seed=5)  # more steps than an update has pieces


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(weight_updates, "time", found)
    return found


class Job:
    """Work of so many pieces, each of which takes `took` seconds."""

    def __init__(self, clock: Clock, count: int, took: float) -> None:
        self.clock, self.count, self.took = clock, count, took
        self.done, self.closed = 0, False

    def work(self) -> Work[str]:
        try:
            for _ in range(self.count):
                self.clock.now += self.took
                self.done += 1
                yield
            return "done"
        finally:
            self.closed = True


async def steps(clock: Clock, job: Job, took: float, seen: list[int]) -> None:
    """What else the process does: it takes so long each time that it comes round, and sees how far the job is."""
    while not job.closed:
        clock.now += took
        seen.append(job.done)
        await asyncio.sleep(0)


# --- the turns -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("step_ms", "piece_ms", "pieces_a_turn"), [(20, 0.7, 4), (0, 0.7, 4), (20, 9.0, 1), (200, 0.7, 15)])
async def test_a_turn_takes_its_time_and_a_piece_at_most(clock: Clock, step_ms: float, piece_ms: float, pieces_a_turn: int):
    """However slow the steps are, a share of the time is the job's: at 200 ms a turn has 10."""
    job, seen, told = Job(clock, 100, piece_ms * MS), list[int](), list[tuple[float, float]]()
    beside = asyncio.ensure_future(steps(clock, job, step_ms * MS, seen))
    assert await in_turns(job.work(), lambda begin, end: told.append((begin, end)), lambda: None) == "done"
    await beside
    done = np.diff(seen)[1:-1]  # the first one's clock had not begun, the last one may have less to do
    assert done.tolist() == [pieces_a_turn] * len(done) and len(done) >= 2
    budget = max(TURN_S, SHARE * step_ms * MS)
    assert all(0 <= end - begin < budget + piece_ms * MS + 1e-9 for begin, end in told)
    assert sum(end - begin for begin, end in told) == pytest.approx(100 * piece_ms * MS)


async def test_what_goes_wrong_is_raised_and_told(clock: Clock):
    def work() -> Work[None]:
        clock.now += 1
        yield
        raise PolicyMismatch("other weights")

    told = []
    with pytest.raises(PolicyMismatch, match="other weights"):
        await in_turns(work(), lambda begin, end: told.append(end - begin), lambda: None)
    assert told == [1, 0]


async def test_work_is_given_up_before_its_next_turn(clock: Clock):
    cancelled, stopped = Job(clock, 99, 1.0), Job(clock, 99, 1.0)
    waiting = asyncio.ensure_future(in_turns(cancelled.work(), lambda *_: None, lambda: None))
    while cancelled.done < 3:
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert cancelled.closed and cancelled.done == 3

    def check() -> None:
        if stopped.done == 3:
            raise EngineFailed("closed")

    with pytest.raises(EngineFailed, match="closed"):
        await in_turns(stopped.work(), lambda *_: None, check)
    assert stopped.closed and stopped.done == 3


# --- the pieces ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1000, 7), (33,), (5, 100000), (4096, 3), (64, 0), (32, 64), ()])
def test_tensors_are_cut_into_pieces_that_are_the_whole(shape: tuple[int, ...], dtype: torch.dtype, monkeypatch):
    monkeypatch.setattr(piecewise, "PIECE_BYTES", 4096)
    tensor = torch.randn(shape).to(dtype)
    other = tensor.double()
    found = list(by_rows(tensor, other))
    if shape:
        assert torch.equal(torch.cat([a for a, _ in found]), tensor) and torch.equal(torch.cat([b for _, b in found]), other)
        row = tensor.nbytes // len(tensor)
        assert all(a.nbytes <= max(4096, 32 * row) and len(a) == len(b) for a, b in found)
        assert all(len(a) % 32 == 0 for a, _ in found[:-1])
    assert (len(found) > 1) == (tensor.nbytes > 4096 and len(tensor) > 32)


def test_every_pass_over_a_large_tensor_is_cut(monkeypatch):
    """Copied, summed up, packed, and summed up once more: none of it is done to more than a piece."""
    limit, model, receiver = 2048, decoder(seed=1), MemoryReceiver()
    monkeypatch.setattr(piecewise, "PIECE_BYTES", limit)
    largest: dict[str, int] = {}

    def watch(where: Any, name: str, size: Any) -> None:
        inner = getattr(where, name)

        def watched(*given: Any, **more: Any) -> Any:
            largest[name] = max(largest.get(name, 0), size(*given))
            return inner(*given, **more)

        monkeypatch.setattr(where, name, watched)

    published, serving = receiver.publish(1, model), engine()._updates.weights
    watch(fingerprint, "_block_sum", lambda piece, words: piece.tensor.nbytes)
    watch(served_weights, "word_bits", lambda tensor: tensor.nbytes)
    watch(torch.Tensor, "copy_", lambda to, given: to.nbytes)
    watch(torch, "equal", lambda one, other: one.nbytes)
    if (compiled := served_linear.native()) is not None:
        watch(type(compiled), "pack", lambda self, weight, into=None: weight.nbytes)
    staging = Staging(receiver, serving, pack=True)
    staged = at_once(staging.stage(published, serving))
    at_once(staging.prove(staged, published.version))
    rows = 32 * model.layers[0].down.in_features * 4  # type: ignore[union-attr]
    assert {"_block_sum", "word_bits", "copy_", "equal"} <= set(largest)
    assert max(largest.values()) <= max(limit, rows) < max(p.nbytes for p in model.parameters()), largest
    assert staged.version == published.version


def test_an_engine_has_the_memory_of_its_next_version_from_the_beginning():
    """To get it page by page takes the system several times as long as to fill it again."""
    arch = replace(BASE, vocab=20_000, hidden=256)  # an embedding of 20 MB, and its copy
    receiver, model = MemoryReceiver(), decoder(arch, seed=1)
    published, serving = receiver.publish(1, model), serve(decoder(arch), Version(0), pack=True)
    staging = Staging(receiver, serving, pack=True)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    staged = at_once(staging.stage(published, serving))
    pages = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize()
    assert staged.version == published.version
    assert pages < sum(p.nbytes for p in model.parameters()) / 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limit", [256, 2048, 1 << 20])
def test_pieces_come_to_what_the_whole_does(dtype: torch.dtype, limit: int, monkeypatch):
    model = decoder(seed=3, dtype=dtype).requires_grad_(False)
    with monkeypatch.context() as whole:
        whole.setattr(piecewise, "PIECE_BYTES", 1 << 40)
        expected, copies = Contents.of(model, dtype), packed(model)
    monkeypatch.setattr(piecewise, "PIECE_BYTES", limit)
    assert Contents.of(model, dtype) == expected
    found = packed(model)
    assert found.keys() == copies.keys() and all(torch.equal(found[name], copies[name]) for name in copies)
    assert at_once(served_weights.words_in_use(model)) == served_weights.words_by_matrix(model, expected.words)


def packed(model: Decoder) -> dict[str, torch.Tensor]:
    for _, _, copy in model.packed():
        copy.numbers = None
    at_once(model.packing())
    return {name: copy.numbers for name, _, copy in model.packed() if copy.numbers is not None}


# --- an engine -----------------------------------------------------------------------------------------------------------


class Watched:
    """A receiver that says how far it is, and that it was left."""

    def __init__(self, inner: Any, wrong: int = -1) -> None:
        self.inner, self.wrong, self.takes = inner, wrong, inner.takes
        self.given = 0
        self.left = list[Version]()  # those that nobody reads any more

    def receive(self, published: WeightUpdate) -> Iterator[Slice]:
        self.given = 0
        try:
            for piece in self.inner.receive(published):
                self.given += 1
                yield replace(piece, shape=(*piece.shape, 1)) if self.given == self.wrong else piece
        finally:
            self.left.append(published.version)

    def close(self) -> None:
        self.inner.close()


@pytest.fixture
def a_piece_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps and pieces in turns, and many of both, however fast the machine is."""
    monkeypatch.setattr(weight_updates, "TURN_S", 0.0)
    monkeypatch.setattr(weight_updates, "SHARE", 0.0)
    monkeypatch.setattr(piecewise, "PIECE_BYTES", 2048)


def announce(sender: Any, step: int, model: Decoder) -> WeightUpdate:
    own = Contents.of(model, torch.float32)
    return sender.send(Version(step, fingerprint=own.fingerprint), checked(serving_slices(model, torch.float32), own))


async def until(condition: Any) -> None:
    for _ in range(10000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not happen")


def asked(text: np.ndarray, key: str = "") -> GenerateRequest:
    return GenerateRequest(text, PARAMS, key=key, extras=("model_logprobs",))


async def alone(seed: int, text: np.ndarray) -> Completion:
    """What an engine samples that never had other weights than these."""
    fresh = engine(ARCH, seed=seed)
    try:
        return await fresh.generate(asked(text))
    finally:
        await fresh.close()


def same(one: Completion, other: Completion, count: int | None = None) -> None:
    for name in ("tokens", "logprobs"):
        np.testing.assert_array_equal(getattr(one, name)[:count], getattr(other, name)[:count])
    np.testing.assert_array_equal(one.extras["model_logprobs"][:count], other.extras["model_logprobs"][:count])


async def busy(under_test: NativeEngine, text: np.ndarray) -> asyncio.Future[Completion]:
    call = asyncio.ensure_future(under_test.generate(asked(text)))
    await until(lambda: under_test._activity.counters["generated_tokens"] >= 2)
    return call


@pytest.mark.parametrize("transport", ["shared_memory", "checkpoint"])
async def test_weights_staged_between_steps_are_those_that_were_published(transport, a_piece_a_turn, tmp_path: Path):
    """Steps sample with the old weights to the bit, until all has been staged; then everything is the new ones'."""
    sender = make_sender(SyncSettings(transport=transport), tmp_path)
    text, new = prompts(1)[0], decoder(ARCH, seed=1)
    under_test = engine(ARCH, receiver=make_receiver(transport), in_flight="keep")
    try:
        call = await busy(under_test, text)
        before = under_test._activity.counters["steps"]
        version = await under_test.update(announce(sender, 1, new))
        taken = under_test._activity.counters["steps"] - before
        completion = await call
        first = int(np.flatnonzero(completion.versions)[0])
        assert taken > 40 and first > 40, "steps were taken between the pieces"
        same(completion, await alone(0, text), first)
        weights = under_test._updates.weights
        held = dict(weights.decoder.named_parameters())
        assert all(torch.equal(held[name], p) for name, p in new.named_parameters())
        if weights.decoding is not None:
            theirs = {name: copy.numbers.clone() for name, _, copy in weights.decoder.packed() if copy.numbers is not None}
            assert all(torch.equal(theirs[name], numbers) for name, numbers in packed(new).items())
        same(await under_test.generate(asked(text, "later")), await alone(1, text))
        assert version == weights.version
    finally:
        await under_test.close()
        sender.close()


async def test_a_mismatch_between_steps_leaves_the_old_weights_served(a_piece_a_turn):
    memory, text = MemoryReceiver(), prompts(1)[0]
    receiver = Watched(memory, wrong=9)
    under_test = engine(ARCH, receiver=receiver, prefix_cache=False)  # type: ignore[arg-type]
    try:
        for message, corrupt in (("not this model's weights", False), ("announced with fingerprint", True)):
            call, published = await busy(under_test, text), memory.publish(1, decoder(ARCH, seed=1))
            memory.corrupt, receiver.wrong = corrupt, -1 if corrupt else 9
            with pytest.raises(PolicyMismatch, match=message):
                await under_test.update(published)
            assert receiver.left and not call.done(), "found while it generates"
            receiver.left.clear()
            same(await call, await alone(0, text))
            assert (await under_test.stats()).version == Version(0)
        memory.corrupt = False
        assert await under_test.update(published) == published.version
        same(await under_test.generate(asked(text)), await alone(1, text))
    finally:
        await under_test.close()


@pytest.mark.parametrize("busy_too", [True, False])
@pytest.mark.parametrize("transport", ["shared_memory", "checkpoint"])
async def test_an_update_is_cancelled_between_two_pieces(transport, busy_too, a_piece_a_turn, tmp_path: Path):
    sender, text = make_sender(SyncSettings(transport=transport), tmp_path), prompts(1)[0]
    receiver = Watched(make_receiver(transport))
    under_test = engine(ARCH, receiver=receiver)  # type: ignore[arg-type]
    try:
        call = await busy(under_test, text) if busy_too else None
        first, published = announce(sender, 1, decoder(ARCH, seed=1)), announce(sender, 2, decoder(ARCH, seed=2))
        updating = asyncio.ensure_future(under_test.update(first))
        await until(lambda: receiver.given == 5)
        waiting = asyncio.ensure_future(under_test.update(published))
        updating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await updating
        assert receiver.left == [first.version], "nothing of it is read any more"
        assert (await under_test.stats()).version == Version(0)
        assert await waiting == published.version
        if call is not None:
            await call
        same(await under_test.generate(asked(text, "later")), await alone(2, text))
    finally:
        await under_test.close()
        sender.close()


@pytest.mark.parametrize("asleep", [True, False])
async def test_closing_ends_an_update_between_two_pieces(asleep, a_piece_a_turn):
    memory = MemoryReceiver()
    receiver = Watched(memory)
    under_test = engine(ARCH, receiver=receiver)  # type: ignore[arg-type]
    if asleep:
        await under_test.sleep()
    updating = asyncio.ensure_future(under_test.update(memory.publish(1, decoder(ARCH, seed=1))))
    await until(lambda: receiver.given == 5)
    await under_test.close()
    with pytest.raises(EngineFailed, match="was closed"):
        await updating
    assert receiver.given <= 6 and len(receiver.left) == 1 and memory.closed
    assert under_test._updates.weights.version == Version(0)


@pytest.mark.parametrize("asleep", [True, False])
async def test_without_steps_turns_follow_one_another_and_callers_have_theirs(asleep, a_piece_a_turn):
    memory = MemoryReceiver()
    under_test = engine(ARCH, receiver=memory)
    if asleep:
        await under_test.sleep()
    rounds, published = 0, memory.publish(1, decoder(ARCH, seed=1))
    updating = asyncio.ensure_future(under_test.update(published))
    while not updating.done():
        await under_test.stats()
        await asyncio.sleep(0)
        rounds += 1
    told = [span for span in (await under_test.telemetry()).spans if span.name in ("stage", "prove")]
    assert updating.result() == published.version and len(told) > 40
    assert len(told) - 2 <= rounds <= len(told) + 10, "callers come round once a turn, and nothing waits in between"
    await under_test.close()


async def test_what_is_staged_between_steps_is_told_in_the_engines_account(monkeypatch):
    """Its turns lie in what the loop calls its yields, and are no part of its steps."""
    monkeypatch.setattr(weight_updates, "TURN_S", 0.0)
    memory, text = MemoryReceiver(), prompts(1)[0]
    under_test = engine(ARCH, receiver=memory)
    try:
        call = await busy(under_test, text)
        await under_test.update(memory.publish(1, decoder(ARCH, seed=1)))
        await call
        spans = (await under_test.telemetry()).spans
        generated = [s for s in spans if s.name == "generate"]
        for name in ("stage", "prove"):
            assert {s.args["step"] for s in spans if s.name == name} == {1}
        begin, end = generated[0].start, generated[-1].end
        assert all(begin <= s.start <= s.end <= end for s in spans if s.name in ("stage", "commit"))
    finally:
        await under_test.close()


async def test_an_engine_that_finishes_first_drains_what_was_in_flight_when_all_was_staged(a_piece_a_turn):
    memory, text = MemoryReceiver(), prompts(1)[0]
    under_test = engine(ARCH, receiver=memory, in_flight="finish")
    try:
        call = await busy(under_test, text)
        updating = asyncio.ensure_future(under_test.update(memory.publish(1, decoder(ARCH, seed=1))))
        await until(lambda: under_test._updates._draining is not None)
        assert not call.done() and not updating.done()
        same(await call, await alone(0, text))
        assert (await updating).step == 1
    finally:
        await under_test.close()


async def test_rows_that_do_not_depend_on_neighbours_do_not_depend_on_staging(a_piece_a_turn):
    memory, text = MemoryReceiver(), prompts(1)[0]
    under_test, other = (engine(ARCH, receiver=memory, batch_invariant=True, in_flight="finish") for _ in range(2))
    try:
        expected = await other.generate(asked(text))
        call = await busy(under_test, text)
        await under_test.update(memory.publish(1, decoder(ARCH, seed=1)))
        same(await call, expected)
    finally:
        await under_test.close()
        await other.close()
