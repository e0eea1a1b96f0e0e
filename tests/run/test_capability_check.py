"""What a recipe needs and an engine lacks is refused by name, or adapted to and said; it is never silently used."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tidemill.core.errors import ConfigError
from tidemill.core.interfaces import Capabilities
from tidemill.core.token_extras import TokenExtra
from tidemill.core.types import Completion, Finish, GenerateRequest, SamplingParams, Version
from tidemill.core.weight_update import UpdateSupport, WeightPart, WeightUpdate
from tidemill.run.capability_check import NO_PROBES, OLDEST, UNPROVEN, UNSEEDED, adapted, check_context, check_engine
from tidemill.run.recipe import RunConfig, load_recipe

BASE = {"run_dir": "runs/x", "model": "new:0.1m", "env": "guess"}
ENTROPY = TokenExtra("entropy", "float32")
REFERENCE = ("algorithm.reference={kl=0.1}", "placement.reference_engines=1")


def recipe(*overrides: str) -> RunConfig:
    return load_recipe([], overrides, BASE)


@pytest.mark.parametrize(
    ("lacks", "overrides", "role", "says"),
    [
        ({"support": False}, ["rollout.top_p=0.9"], "engine", "rollout.top_p = 0.9: engine.kind = 'x' lacks .*'support'"),
        ({"support": False}, ["rollout.top_k=5"], "engine", "rollout.top_k = 5: .*'support'.* leave out rollout.top_k"),
        ({"support": False}, ["rollout.min_p=0.1"], "engine", "rollout.min_p = 0.1: .*'support'"),
        ({"score": False}, REFERENCE, "reference", "placement.reference_engines = 1: .* lacks the capability 'score'; set"),
        (
            {"scores_at": 1.0},
            (*REFERENCE, "rollout.temperature=0.7"),
            "reference",
            "'score' at rollout.temperature = 0.7, only",
        ),
        ({"proof": "received", "scores_at": 1.0}, ["rollout.temperature=0.7"], "engine", "'score' at .* = 0.7, only at 1"),
        ({"proof": "none"}, [], "engine", "lacks the capability 'proof': it cannot show which weights it serves"),
        ({"proof": "received", "score": False}, [], "engine", "'received'.* lacks the capability 'score'"),
        ({"updates": UpdateSupport(("delta",))}, [], "engine", "placement.sync.transport = 'shared_memory': .* full weight"),
        ({"proof": "received"}, ["record.probe_every=0"], "engine", "record.probe_every = 0: .* set record.probe_every = 5"),
        ({"seeds": False}, ["deterministic=true"], "engine", "deterministic = true: .* lacks the capability 'seeds'"),
        ({"samples_at": 1.0}, ["rollout.temperature=0.7"], "engine", "rollout.temperature = 0.7: .* at 1 only; set rollout"),
    ],
)
def test_what_cannot_be_done_is_refused(lacks: dict[str, Any], overrides: list[str], role: str, says: str) -> None:
    config = recipe(*overrides)
    assert check_engine("x", Capabilities(64), config, role) == []  # of an engine that has everything
    with pytest.raises(ConfigError, match=says) as refused:
        check_engine("x", Capabilities(64, **lacks), config, role)
    assert "engine.kind = 'x'" in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("lacks", "overrides", "said"),
    [
        ({"support": False}, [], []),  # nothing is truncated
        ({"token_versions": False}, [], [OLDEST]),
        ({"score": False}, [], [NO_PROBES.format(at="")]),
        ({"scores_at": 1.0}, ["rollout.temperature=1.0"], []),
        ({"scores_at": 1.0}, ["rollout.temperature=0.7"], [NO_PROBES.format(at=" at rollout.temperature = 0.7, only at 1")]),
        ({"score": False}, ["record.probe_every=0"], []),
        ({"proof": "received"}, [], [UNPROVEN]),
        ({"seeds": False}, [], [UNSEEDED]),
        ({"samples_at": 1.0}, [], []),
        ({"token_versions": False, "score": False}, [], [OLDEST, NO_PROBES.format(at="")]),
        ({"extras": (), "constraint": False}, ["rollout.top_p=0.9"], []),  # training needs neither
    ],
)
def test_what_can_be_adapted_to_is_said(lacks: dict[str, Any], overrides: list[str], said: list[str]) -> None:
    assert check_engine("x", Capabilities(64, **lacks), recipe(*overrides), "engine") == [
        f"engine.kind = 'x': {s}" for s in said
    ]


@pytest.mark.parametrize(
    ("returned", "overrides", "says"),
    [
        ((), [], "algorithm.loss reads the token extra 'entropy', and engine.kind = 'x' returns none: take another loss"),
        ((replace(ENTROPY, name="experts"),), [], "'x' returns 'experts': take another loss, or another kind of engine"),
        ((replace(ENTROPY, dtype="float16"),), [], r"reads .* as \(entropy: float32 \[\], .* returns \(entropy: float16"),
        ((replace(ENTROPY, shape=(2,)),), [], r"returns \(entropy: float32 \[2\], fill 0\): declare it alike in both"),
        ((replace(ENTROPY, fill=-1),), [], r"returns \(entropy: float32 \[\], fill -1\): declare it alike in both"),
        ((ENTROPY,), ["algorithm=sft"], "and given = 'answers' samples nothing: take another loss"),
    ],
)
def test_a_token_extra_that_is_read_and_not_returned_is_refused(
    returned: tuple[TokenExtra, ...], overrides: list[str], says: str
) -> None:
    able = Capabilities(64, extras=(ENTROPY, replace(ENTROPY, name="unread")))
    assert check_engine("x", able, recipe(), "engine", [ENTROPY]) == []
    assert check_engine("x", Capabilities(64, extras=returned), recipe(*overrides), "engine") == [], "nothing reads it"
    with pytest.raises(ConfigError, match=says) as refused:
        check_engine("x", Capabilities(64, extras=returned), recipe(*overrides), "engine", [ENTROPY])
    assert "\n" not in str(refused.value)


def test_changes_need_an_engine_that_takes_them() -> None:
    config, takes = recipe("placement.sync.full_every=8"), UpdateSupport(("full", "delta"))
    assert check_engine("x", Capabilities(64, updates=takes), config, "engine") == []
    with pytest.raises(ConfigError, match=r"placement.sync.full_every = 8: engine.kind = 'x' takes full versions only"):
        check_engine("x", Capabilities(64), config, "engine")


def test_an_engine_that_joins_with_less_context_is_adapted_to_or_refused_by_name() -> None:
    less = Capabilities(32)
    for can, role in ((Capabilities(64), "engine"), (Capabilities(65), "reference")):
        assert check_context("engine-1", can, 64, recipe("deterministic=true"), role) == []
    (said,) = check_context("engine-1", less, 64, recipe(), "engine")
    assert said.startswith("engine-1 joins with a context of 32 tokens, where the run had 64 so far: sequences")
    for config, role, why in (
        (recipe("deterministic=true"), "engine", "a deterministic run cannot change its limits"),
        (recipe(), "reference", "rows to score may be longer"),
    ):
        with pytest.raises(ConfigError, match=f"^engine-1 joins with a context of 32 .*{why}.* engine.context = 32$"):
            check_context("engine-1", less, 64, config, role)


class Unstamped:
    """An engine that answers when it is told to, and stamps everything with the newest version."""

    def __init__(self) -> None:
        self.answer, self.newest = asyncio.Event(), Version(-1)

    async def update(self, published: WeightUpdate) -> Version:
        self.newest = published.version
        return published.version

    async def generate(self, request: GenerateRequest) -> Completion:
        await self.answer.wait()  # bounded: by the test
        new, three = self.newest, np.zeros(3, np.float32)
        stamps = np.full(3, new.step, np.int32)
        return Completion(np.arange(3, dtype=np.int32), three, stamps, (new,), Finish.LENGTH)

    async def stats(self) -> str:
        return "its own"


async def test_every_token_counts_as_the_oldest_version_of_its_request() -> None:
    engine = Unstamped()
    assert adapted(engine, Capabilities(64)) is engine  # type: ignore[arg-type, comparison-overlap]
    proxy: Any = adapted(engine, Capabilities(64, token_versions=False))  # type: ignore[arg-type]
    request = GenerateRequest(np.zeros(2, np.int32), SamplingParams())
    assert await proxy.stats() == "its own"
    await proxy.update(WeightUpdate(Version(4, fingerprint="four"), (WeightPart("memory", ""),)))
    asked = asyncio.create_task(proxy.generate(request))
    await asyncio.sleep(0)  # it has begun
    await proxy.update(WeightUpdate(Version(5, fingerprint="five"), (WeightPart("memory", ""),)))
    engine.answer.set()
    got = await asked
    assert got.sources == (Version(4, fingerprint="four"),) and got.versions.tolist() == [4, 4, 4]
    assert (await proxy.generate(request)).versions.tolist() == [5, 5, 5]
