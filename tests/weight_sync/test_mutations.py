"""Weight sync broken on purpose: each mutation ends the publication, so that no gradient step follows it (I1).

Trainer, engine, pool and transport are real. Each mutation sets in with version `SICK`, at the place where a bug of its kind
would stand; the steps that were taken by then are the only ones ever taken. `test_mutated_runs.py` has whole runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from live_cases import form
from mutation_cases import SICK, STEPS, TRANSPORTS, Steps, assert_nothing_after

from tidemill.core import fault_injection
from tidemill.core.errors import PolicyMismatch
from tidemill.core.types import Version
from tidemill.core.weight_update import WeightPart, WeightUpdate
from tidemill.engine.native import staged_weights as staging
from tidemill.engine.native.staged_weights import Staging, Weights
from tidemill.engine.native.weight_updates import WeightUpdater
from tidemill.models.hf_weights import hf_views
from tidemill.models.piecewise import Work, at_once
from tidemill.models.weight_slices import Slice, Stream
from tidemill.trainer import publication
from tidemill.weight_sync import checkpoint_transport, manifest, shared_memory_transport
from tidemill.weight_sync.checkpoint_transport import CheckpointSender
from tidemill.weight_sync.live_ends import LiveEnd
from tidemill.weight_sync.manifest import WeightManifest
from tidemill.weight_sync.shared_memory_transport import SharedMemorySender

PLUGIN = Path(__file__).parents[2] / "vllm_plugin"
STORED = {"shared_memory": SharedMemorySender, "checkpoint": CheckpointSender}
Q, Q1, OUT = (f"model.layers.{i}.self_attn.{name}_proj.weight" for i, name in ((0, "q"), (1, "q"), (1, "o")))


def across(names: Iterable[str], others: Sequence[str] = TRANSPORTS) -> list[Any]:
    """Every pair, of which each name's first is in the fast suite."""
    return [
        pytest.param(name, other, marks=[] if (i + j) % len(others) == 0 else pytest.mark.slow)
        for i, name in enumerate(names)
        for j, other in enumerate(others)
    ]


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(tmp_path, monkeypatch)


# --- what the trainer streams --------------------------------------------------------------------------------------------

Change = Callable[[list[Slice], list[Slice]], list[Slice]]  # (the slices, those of version 0)


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda now, _: [replace(s, tensor=change(s.tensor.clone())) if s.name == name else s for s in now]


def bump(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(torch.int32)[3, 5] ^= 1  # the last bit of one element
    return tensor


def exchange(one: str, other: str) -> Change:
    names = {one: other, other: one}
    return lambda now, _: [replace(s, name=names.get(s.name, s.name)) for s in now]


CHANGES: dict[str, Change] = {
    "dropped": lambda now, _: [s for s in now if s.name != Q],
    "swapped": exchange(Q, Q1),
    "transposed": changed(OUT, lambda t: t.t()),
    "one element changed": changed(Q, bump),
    "rows exchanged": changed(Q, lambda t: t.flip(0)),  # a sum of words would not see it, the fingerprint does
    "one tensor of an old version": lambda now, old: [
        next(o for o in old if o.name == Q) if s.name == Q else s for s in now
    ],
    "an old version": lambda now, old: old,
    "another dtype": changed(Q, lambda t: t.to(torch.bfloat16)),
    "one tensor twice": lambda now, _: [*now, now[3]],
}


@pytest.mark.parametrize(("name", "transport"), across(CHANGES))
def test_a_trainer_that_streams_something_else(tiny: Steps, name: str, transport: str) -> None:
    stream, kept = publication.serving_slices, list[Slice]()

    def mutated(*given: Any) -> Iterator[Slice]:
        now = list(stream(*given))
        if not kept:
            kept.extend(replace(s, tensor=s.tensor.clone()) for s in now)
        yield from CHANGES[name](now, kept) if tiny.sick else now

    tiny.monkeypatch.setattr(publication, "serving_slices", mutated)
    told = {"swapped": f"({Q}|{Q1})", "transposed": OUT, "an old version": "", "one tensor twice": "a second time"}
    at_once = name in ("dropped", "another dtype", "one tensor twice")  # without a look at the numbers
    at_once = at_once or (name == "swapped" and transport not in STORED)  # which sends in the order that it offered
    found_by = "about to be sent are not" if at_once else "received .* first tensor that differs is"
    with pytest.raises(PolicyMismatch, match=f"{found_by}.*{told.get(name, Q)}"):
        tiny.until(transport)
    assert_nothing_after(tiny)


# --- what the transport does with it ---------------------------------------------------------------------------------------


def sent_otherwise(tiny: Steps, transport: str, change: Change) -> None:
    """The sender takes the trainer's stream, checked as it is, and writes something else."""
    kept = list[Slice]()

    def altered(slices: Iterable[Slice]) -> list[Slice]:
        now = list(slices)
        if not kept:
            kept.extend(replace(s, tensor=s.tensor.clone()) for s in now)
        return change(now, kept) if tiny.sick else now

    through(tiny, transport, altered)


def through(tiny: Steps, transport: str, altered: Callable[[Iterable[Slice]], list[Slice]]) -> None:
    """Have a transport send what `altered` makes of the trainer's stream."""
    if transport in STORED:
        kind = STORED[transport]
        send = kind.send

        def sent(sender: Any, version: Version, slices: Iterator[Slice], onto: None) -> WeightUpdate:
            return send(sender, version, iter(altered(slices)), onto)

        tiny.monkeypatch.setattr(kind, "send", sent)
        return
    offer = LiveEnd.offer

    def offered(end: LiveEnd, version: Version, forms: Iterable[Slice], stream: Stream, onto: None) -> WeightUpdate:
        pieces = altered(stream())
        return offer(end, version, map(form, pieces), lambda: pieces, onto)

    tiny.monkeypatch.setattr(LiveEnd, "offer", offered)


@pytest.mark.parametrize(("name", "transport"), across(name for name in CHANGES if name != "one tensor twice"))
def test_a_transport_that_writes_something_else(tiny: Steps, name: str, transport: str) -> None:
    sent_otherwise(tiny, transport, CHANGES[name])
    with pytest.raises(PolicyMismatch, match=r"fingerprint|missing") as raised:
        tiny.until(transport)
    if name in ("transposed", "one element changed", "rows exchanged"):
        assert f"differs is {OUT if name == 'transposed' else Q}" in str(raised.value)
    if name == "an old version":
        assert "still serving policy@v1" in str(raised.value)
    assert_nothing_after(tiny)


@pytest.mark.parametrize("by", ["vllm", "server"])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.runs
def test_engines_with_servers_refuse_all_of_them_before_they_load(tiny: Steps, transport: str, by: str) -> None:
    """What vLLM's ranks do with an update, and what stands before SGLang's and transformers' loading."""
    tiny.monkeypatch.syspath_prepend(str(PLUGIN))
    assert Steps(tiny.folder / "sound", tiny.monkeypatch).until(transport, by=by) == STEPS
    for name in (name for name in CHANGES if name != "one tensor twice"):
        with pytest.MonkeyPatch.context() as patch:
            seen = Steps(tiny.folder / name.replace(" ", "-"), patch)
            sent_otherwise(seen, transport, CHANGES[name])
            with pytest.raises(PolicyMismatch, match=r"fingerprint|missing|policy@v"):
                seen.until(transport, by=by)
        assert_nothing_after(seen)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_weights_that_are_served_already_are_said_to_be_those(tiny: Steps, transport: str) -> None:
    """Served weights unchanged while the trainer's changed."""
    before: list[list[Slice]] = []

    def same_again(now: list[Slice], _: list[Slice]) -> list[Slice]:
        return before[-2]  # the trainer's stream of this version has been seen already

    sent_otherwise(tiny, transport, same_again)

    def remember(slices: Iterable[Slice]) -> list[Slice]:
        now = list(slices)
        before.append([replace(s, tensor=s.tensor.clone()) for s in now])
        return now

    through(tiny, transport, remember)
    with pytest.raises(PolicyMismatch, match=r"these are the weights of policy@v1"):
        tiny.until(transport)
    assert_nothing_after(tiny)


def put_nothing(tiny: Steps) -> None:
    """Half of the blocks are never written: the slot keeps those of the version before the last."""
    put, count = shared_memory_transport._Slot.put, iter(range(10**6))

    def half(slot: Any, start: int, tensor: torch.Tensor) -> None:
        if not (tiny.sick and next(count) >= 8):
            put(slot, start, tensor)

    tiny.monkeypatch.setattr(shared_memory_transport._Slot, "put", half)


def write_old_files(tiny: Steps) -> None:
    save = checkpoint_transport.save_file
    old: dict[str, torch.Tensor] = {}

    def stale(tensors: dict[str, torch.Tensor], path: Path) -> None:
        old.update(old or {name: tensor.clone() for name, tensor in tensors.items()})
        save(old if tiny.sick else tensors, path)

    tiny.monkeypatch.setattr(checkpoint_transport, "save_file", stale)


@pytest.mark.parametrize(("transport", "mutate"), [("shared_memory", put_nothing), ("checkpoint", write_old_files)])
def test_bytes_that_are_not_those_of_the_manifest(tiny: Steps, transport: str, mutate: Callable[[Steps], None]) -> None:
    mutate(tiny)
    with pytest.raises(PolicyMismatch, match="the first tensor that differs is"):
        tiny.until(transport)
    assert_nothing_after(tiny)


MANIFESTS: dict[str, Callable[[WeightManifest], WeightManifest]] = {
    "of another version": lambda m: msgspec.structs.replace(m, version=replace(m.version, step=SICK - 1)),
    "with another fingerprint": lambda m: msgspec.structs.replace(m, version=replace(m.version, fingerprint="0" * 32)),
    "without a tensor": lambda m: msgspec.structs.replace(m, blocks=m.blocks[:-1]),
    "with a tensor by another name": lambda m: with_block(m, name="model.layers.9.mlp.up_proj.weight"),
    "with another shape": lambda m: with_block(m, shape=m.blocks[0].shape[::-1], size=m.blocks[0].size[::-1]),
    "in another format": lambda m: msgspec.structs.replace(m, format="tidemill-weights-0"),
}


def with_block(m: WeightManifest, **fields: Any) -> WeightManifest:
    return msgspec.structs.replace(m, blocks=[msgspec.structs.replace(m.blocks[0], **fields), *m.blocks[1:]])


@pytest.mark.parametrize(("name", "transport"), across(MANIFESTS))
def test_a_wrong_manifest(tiny: Steps, name: str, transport: str) -> None:
    encode = manifest.WeightManifest.encode
    mutated = lambda self: encode(MANIFESTS[name](self) if tiny.sick else self)  # noqa: E731
    tiny.monkeypatch.setattr(manifest.WeightManifest, "encode", mutated)
    with pytest.raises(PolicyMismatch):
        tiny.until(transport)
    assert_nothing_after(tiny)


@pytest.mark.parametrize("transport", STORED)
def test_the_place_of_an_old_version_is_announced(tiny: Steps, transport: str) -> None:
    kind = STORED[transport]
    send, places = kind.send, list[tuple[WeightPart, ...]]()

    def mutated(sender: Any, version: Version, slices: Iterator[Slice], onto: None) -> WeightUpdate:
        published = send(sender, version, slices, onto)
        places.append(published.parts)
        return replace(published, parts=places[-2]) if tiny.sick else published

    tiny.monkeypatch.setattr(kind, "send", mutated)
    with pytest.raises(PolicyMismatch, match="announced was policy@v2"):
        tiny.until(transport)
    assert_nothing_after(tiny)


def test_a_transport_that_announces_another_version(tiny: Steps) -> None:
    send = SharedMemorySender.send

    def mutated(sender: Any, version: Version, slices: Iterator[Slice], onto: None) -> WeightUpdate:
        published = send(sender, version, slices, onto)
        return replace(published, version=replace(version, fingerprint="1" * 32)) if tiny.sick else published

    tiny.monkeypatch.setattr(SharedMemorySender, "send", mutated)
    with pytest.raises(PolicyMismatch, match=r"the transport announces policy@v2 .1111"):
        tiny.until("shared_memory")
    assert_nothing_after(tiny)


# --- what the engine does with it ----------------------------------------------------------------------------------------

LOADS: dict[str, Callable[[list[Slice], dict[str, torch.Tensor]], list[Slice]]] = {
    "stops half-way": lambda now, views: now[: len(now) // 2],
    "leaves one tensor as it was": lambda now, views: [s for s in now if s.name != Q],
    "exchanges two": lambda now, views: exchange(Q, Q1)(now, []),
    "transposes one": lambda now, views: changed(OUT, lambda t: t.t())(now, []),
    "changes one element": lambda now, views: changed(Q, bump)(now, []),
}


@pytest.mark.parametrize("name", LOADS)
def test_an_engine_that_stages_something_else(tiny: Steps, name: str) -> None:
    """It copies what it received wrongly, and does not notice: a copy without the checks of `loading`."""
    load = staging.loading

    def mutated(decoder: Any, slices: Iterator[Slice], *more: Any) -> Work[None]:
        if not tiny.sick:
            yield from load(decoder, slices, *more)
            return
        views = dict(hf_views(decoder))
        for piece in LOADS[name]([replace(s, tensor=s.tensor.clone()) for s in slices], views):
            views[piece.name].copy_(piece.tensor)

    tiny.monkeypatch.setattr(staging, "loading", mutated)
    with pytest.raises(PolicyMismatch, match=r"announced with fingerprint .*first tensor that differs is model\..*v1"):
        tiny.until("shared_memory")
    assert_nothing_after(tiny)


COMMITS: dict[str, tuple[Callable[[Weights, Weights], Weights], str]] = {
    "a new label on the old weights": (lambda old, new: replace(old, version=new.version), "other weights are served"),
    "the new decoder with the old head": (lambda old, new: replace(new, head=old.head), "head"),
    "the old decoder with the new head": (
        lambda old, new: replace(new, decoder=old.decoder),
        "with other weights|other weights are",
    ),
    "the old layers in all but the head": (
        lambda old, new: replace(old, head=new.head, version=new.version),
        "other weights are served",
    ),
    "nothing": (lambda old, new: old, "policy@v1 is served"),
}


@pytest.mark.parametrize(("name", "in_flight"), across(COMMITS, ("keep", "finish", "recompute")))
def test_an_engine_that_commits_something_else(tiny: Steps, name: str, in_flight: str) -> None:
    swap, (commit, message) = WeightUpdater._swap, COMMITS[name]

    def mutated(updates: WeightUpdater, staged: Weights) -> None:
        swap(updates, commit(updates.weights, staged) if tiny.sick else staged)

    tiny.monkeypatch.setattr(WeightUpdater, "_swap", mutated)
    with pytest.raises(PolicyMismatch, match=message):
        tiny.until("shared_memory", engine={"in_flight": in_flight})
    assert_nothing_after(tiny)


def test_an_engine_whose_weights_change_between_staging_and_commit(tiny: Steps) -> None:
    stage = Staging.stage

    def mutated(self: Staging, published: WeightUpdate, serving: Weights) -> Work[Weights]:
        staged = yield from stage(self, published, serving)
        if tiny.sick:
            layer = staged.decoder.layers[1].o  # type: ignore[union-attr]
            layer.weight[0, 0] += 1e-3
            at_once(layer.packed.packing(layer.weight))
        return staged

    tiny.monkeypatch.setattr(Staging, "stage", mutated)
    with pytest.raises(PolicyMismatch, match=f"other weights are served: {OUT} differs"):
        tiny.until("shared_memory")
    assert_nothing_after(tiny)


# --- interrupted ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fault", "transport"), across(("trainer:stream:2:raise", "trainer:stream:2:disk-full")))
def test_a_sender_that_ends_half_way(tiny: Steps, fault: str, transport: str) -> None:
    log = tiny.folder / "faults.log"
    armed = fault_injection.Faults([fault_injection.Fault.parse(fault)], log, os.getpid())
    tiny.monkeypatch.setattr(fault_injection, "_armed", armed)
    with pytest.raises((fault_injection.FaultError, OSError), match=r"on purpose|No space"):
        tiny.until(transport)
    assert log.read_text().split() == [fault]
    assert_nothing_after(tiny)
