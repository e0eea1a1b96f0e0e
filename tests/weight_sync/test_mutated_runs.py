"""Whole runs whose weight sync is broken on purpose: no gradient step, and no recorded version, follows (I1).

Controller, trainer, engine, transport and ledger are real and inline. `test_mutations.py` has every mutation, without a run.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from live_cases import form
from mutation_cases import SICK, STEPS, TRANSPORTS, Run, assert_nothing_after

from tidemill.core.errors import PolicyMismatch
from tidemill.core.types import GenerateRequest, Version
from tidemill.core.weight_update import AddedTo, WeightUpdate
from tidemill.engine.native import native_engine
from tidemill.engine.native import staged_weights as staging
from tidemill.engine.native.native_engine import NativeEngine
from tidemill.engine.native.staged_weights import Weights
from tidemill.ledger.ledger import SqliteLedger
from tidemill.models.new_model import SIZES, fresh_model
from tidemill.models.weight_slices import Slice, Stream
from tidemill.weight_sync.checkpoint_transport import CheckpointSender
from tidemill.weight_sync.live_ends import LiveEnd
from tidemill.weight_sync.shared_memory_transport import SharedMemorySender

pytestmark = pytest.mark.runs


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "m"
    fresh_model(folder, alphabet="abcdefghij0123456789 -=", context=48, **SIZES["0.1m"])
    return folder


@pytest.fixture
def tiny(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(tmp_path, monkeypatch, model=model)


def each_transport() -> list[Any]:
    """Each transport with full versions only, and with changes between them; half of the pairs are in the fast suite."""
    pairs = [(transport, full_every) for transport in TRANSPORTS for full_every in (1, 3)]
    return [pytest.param(*pair, marks=pytest.mark.slow if i in (1, 2, 5, 6) else []) for i, pair in enumerate(pairs)]


@pytest.mark.parametrize(("transport", "full_every"), each_transport())
def test_a_transport_that_changes_one_bit(tiny: Run, transport: str, full_every: int) -> None:
    """Of a tensor, or of what changed in it."""

    def altered(slices: Iterable[Slice]) -> list[Slice]:
        now = list(slices)
        if tiny.sick:
            now[3] = replace(now[3], tensor=now[3].tensor.clone())
            now[3].tensor.view(-1).view(torch.uint8)[-1] ^= 1
        return now

    for kind in (SharedMemorySender, CheckpointSender):
        send = kind.send

        def sent(end: Any, version: Version, slices: Any, onto: AddedTo | None = None, send: Any = send) -> WeightUpdate:
            return send(end, version, iter(altered(slices)), onto)

        tiny.monkeypatch.setattr(kind, "send", sent)
    offer = LiveEnd.offer

    def offered(end: LiveEnd, version: Version, forms: Any, stream: Stream, onto: AddedTo | None = None) -> WeightUpdate:
        pieces = altered(stream())
        return offer(end, version, map(form, pieces), lambda: pieces, onto)

    tiny.monkeypatch.setattr(LiveEnd, "offer", offered)
    with pytest.raises(PolicyMismatch, match=r"fingerprint|is not its change"):
        tiny.until(transport, full_every=full_every)
    assert_nothing_after(tiny)


@pytest.mark.parametrize(("transport", "full_every"), each_transport())
def test_without_a_mutation_the_same_run_completes(tiny: Run, transport: str, full_every: int) -> None:
    assert tiny.until(transport, full_every=full_every) == STEPS
    assert tiny.applied == tiny.ended_steps() == STEPS and tiny.versions() == list(range(STEPS + 1))
    told = [json.loads(line) for line in (tiny.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    sent, whole = (sum(each.get(f"weights/{kind}_bytes", 0) for each in told) for kind in ("sent", "whole"))
    assert 0 < sent == whole if full_every == 1 else 0 < sent < whole


# --- what no fingerprint sees: the right weights, and something else made of them ----------------------------------------


def assert_refused_before_the_next_step(tiny: Run) -> None:
    assert tiny.applied == tiny.ended_steps() == SICK and tiny.versions() == list(range(SICK + 1))


def test_an_engine_that_computes_with_old_weights(tiny: Run) -> None:
    compute, old = native_engine.run, list[Weights]()

    def mutated(weights: Weights, *given: Any) -> Any:
        if weights.version.step == 0 and not old:
            old.append(staging.serve(copy.deepcopy(weights.decoder), weights.version, pack=True))
        return compute(old[0] if weights.version.step >= SICK else weights, *given)

    tiny.monkeypatch.setattr(native_engine, "run", mutated)
    with pytest.raises(PolicyMismatch, match=r"policy@v2: .* hold the same weights and disagree .*stale weights"):
        tiny.until("shared_memory", max_lag=0)
    assert_refused_before_the_next_step(tiny)


@pytest.mark.parametrize("probe_only", [False, True])
def test_an_engine_that_records_other_logprobs(tiny: Run, probe_only: bool) -> None:
    generate, score = NativeEngine.generate, NativeEngine.score

    async def mutated(engine: NativeEngine, request: GenerateRequest) -> Any:
        completion = await generate(engine, replace(request, extras=("model_logprobs",)))
        if tiny.sick:
            completion.logprobs = completion.extras["model_logprobs"]
        return completion

    async def scored(engine: NativeEngine, tokens: Any, policy: str, temperature: float, top_k: int) -> Any:
        return await score(engine, tokens, policy, 1.0 if tiny.sick else temperature, top_k)

    name, patched = ("score", scored) if probe_only else ("generate", mutated)
    tiny.monkeypatch.setattr(NativeEngine, name, patched)
    rollout = {"groups": 2, "group_size": 2, "max_tokens": 3, "temperature": 0.7}
    expected = "rows they were asked to score" if probe_only else r"temperature \(the engines sampled at temperature 1.0\)"
    with pytest.raises(PolicyMismatch, match=expected):
        tiny.until("shared_memory", max_lag=0, rollout=rollout, record={"probe_every": 1, "trace": False})
    assert_refused_before_the_next_step(tiny)


def test_weights_that_stay_the_same_are_explained_once(tiny: Run) -> None:
    """The schedule ends at a learning rate of 0: the last version holds the weights of the one before."""
    assert tiny.until("shared_memory", trainer={"lr": 1e-2, "schedule": "linear"}) == STEPS
    with SqliteLedger(tiny.folder / "run", mode="read") as ledger:
        events = [event.detail for event in ledger.events("weights_unchanged")]
        *_, before, last = ledger.versions()
    assert events == [{"version": f"policy@v{STEPS}", "why": "the learning rate is 0"}]
    assert before.fingerprint == last.fingerprint
