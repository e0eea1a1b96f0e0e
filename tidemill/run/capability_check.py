"""Check of engines' capabilities against the recipe: refusal, or adaptation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from tidemill.core.errors import ConfigError
from tidemill.core.interfaces import Capabilities, Engine
from tidemill.core.token_extras import TokenExtra
from tidemill.core.types import Completion, GenerateRequest, Version
from tidemill.core.weight_update import WeightUpdate
from tidemill.run.recipe import RunConfig

UNPROVEN = "it proves only what it received, not what it serves: probes hold it against the trainer"
OLDEST = "it does not stamp tokens with versions: every token counts as the oldest version that may have sampled it"
UNSEEDED = "its seeds do not repeat tokens: the same recipe samples others each time"
NO_PROBES = "it cannot score given tokens{at}: no probe of matched versions is made (record.probe_every)"


def check_engine(
    kind: str,
    can: Capabilities,
    config: RunConfig,
    role: str,
    extras: Sequence[TokenExtra] = (),
    takes_turns: bool = False,
    updated: bool = True,
) -> list[str]:
    """Raise ConfigError for what this role needs and the engine lacks; return what the run adapts to.

    role: "reference" only scores; any other samples, and is updated if `updated`. extras: what the losses read of each
    token. takes_turns: it sleeps while the trainer computes.
    """
    engine = f"engine.kind = {kind!r}"
    if role == "reference":
        if not can.scores(config.rollout.temperature):
            raise ConfigError(
                f"placement.reference_engines = {config.placement.reference_engines}: {engine} lacks the capability "
                f"'score'{_at(can, config)}; set placement.reference_engines = 0, or take another kind of engine"
            )
        return []
    for refused in _refusals(engine, can, config):
        raise ConfigError(refused)
    if role == "engine" and config.side_by_side and not can.policies:
        raise ConfigError(
            f"policies = {', '.join(config.side_by_side)}: {engine} lacks the capability 'policies', to serve several side "
            "by side; leave policies out, or take another kind of engine"
        )
    if takes_turns and not can.sleep:
        raise ConfigError(
            f"placement.share = {config.placement.share!r}: trainer and engines are to take turns on one device, and "
            f"{engine} lacks the capability 'sleep'; set placement.share = 'beside', or take another kind of engine"
        )
    _expect_extras(engine, can, config, extras)
    if updated:
        _expect_updates(engine, can, config)
    probes = config.record.probe_every > 0
    blind = probes and not can.scores(config.rollout.temperature)
    told = [
        (not can.token_versions, OLDEST),
        (blind, NO_PROBES.format(at=_at(can, config))),
        (can.proof == "received", UNPROVEN),
        (not can.seeds, UNSEEDED),
    ]
    return [f"{engine}: {said}" for holds, said in told if holds]


def _expect_updates(engine: str, can: Capabilities, config: RunConfig) -> None:
    """Raise ConfigError unless the engine takes what the trainer publishes."""
    transport, kinds = config.placement.sync.kind_name, can.updates.kinds
    if config.adapter_rank:
        if "adapter" not in kinds:
            raise ConfigError(
                f"trainer.lora.publish = 'adapter': {engine} cannot take adapters by the transport {transport!r}; set "
                "trainer.lora.publish = 'merged', or take another kind of engine"
            )
        return
    if "full" not in kinds:
        raise ConfigError(
            f"placement.sync.transport = {transport!r}: {engine} cannot take full weight updates by it, and trainers "
            "publish no others; take another kind of engine, or another transport"
        )
    if (every := config.placement.sync.every_full) > 1 and "delta" not in kinds:
        raise ConfigError(
            f"placement.sync.full_every = {every}: {engine} takes full versions only, no changes; leave it out, or take "
            "another kind of engine"
        )


def _refusals(engine: str, can: Capabilities, config: RunConfig) -> Iterator[str]:
    """Sentences on what sampling or the proof of new weights needs and the engine lacks."""
    r, received = config.rollout, f"{engine} proves only what it received (proof = 'received')"
    truncated = {"top_p": r.top_p < 1, "top_k": r.top_k > 0, "min_p": r.min_p > 0}
    for key in [key for key, on in truncated.items() if on and not can.support]:
        yield (
            f"rollout.{key} = {getattr(r, key)}: {engine} lacks the capability 'support', the tokens that each one was "
            f"chosen from; leave out rollout.{key}, or take another kind of engine"
        )
    if can.samples_at is not None and r.temperature not in (0, can.samples_at):
        yield (
            f"rollout.temperature = {r.temperature:g}: {engine} returns the logprobs that it samples by at "
            f"{can.samples_at:g} only; set rollout.temperature = {can.samples_at:g}, or take another kind of engine"
        )
    if config.deterministic and not can.seeds:
        yield (
            f"deterministic = true: {engine} lacks the capability 'seeds', so it samples other tokens each time; set "
            "deterministic = false, or take another kind of engine"
        )
    if can.proof == "none":
        yield (
            f"{engine} lacks the capability 'proof': it cannot show which weights it serves, and nothing is trained on "
            "tokens of an unknown policy; take another kind of engine"
        )
    if can.proof == "received" and not can.scores(r.temperature):
        yield (
            f"{received} and lacks the capability 'score'{_at(can, config)}, by which it could be held against the trainer; "
            "take another kind of engine"
        )
    if can.proof == "received" and not config.record.probe_every:
        yield (f"record.probe_every = 0: {received}, so probes must hold it against the trainer; set record.probe_every = 5")


def _at(can: Capabilities, config: RunConfig) -> str:
    """The temperature that an engine cannot score at, where it can at another one."""
    if not can.score or can.scores_at is None:
        return ""
    return f" at rollout.temperature = {config.rollout.temperature:g}, only at {can.scores_at:g}"


def _expect_extras(engine: str, can: Capabilities, config: RunConfig, extras: Sequence[TokenExtra]) -> None:
    """Raise ConfigError unless the engine returns the token extras that are read, as they are read."""
    own = {extra.name: extra for extra in can.extras}
    for extra in extras:
        reads = f"algorithm.loss reads the token extra {extra.name!r}"
        if config.offline:
            raise ConfigError(
                f"{reads}, which engines return with what they sample, and given = {config.offline!r} samples nothing: take "
                "another loss"
            )
        if extra.name not in own:
            raise ConfigError(
                f"{reads}, and {engine} returns {' and '.join(map(repr, own)) or 'none'}: take another loss, or another "
                "kind of engine"
            )
        if own[extra.name] != extra:
            raise ConfigError(f"{reads} as ({extra}), and {engine} returns ({own[extra.name]}): declare it alike in both")


def check_context(name: str, can: Capabilities, before: int, config: RunConfig, role: str) -> list[str]:
    """Raise ConfigError if a joining engine's context is less than before, where rows rely on that; else say it."""
    if can.context >= before:
        return []
    less = f"{name} joins with a context of {can.context:,} tokens, where the run had {before:,} so far"
    if role == "reference" or config.deterministic:
        why = "rows to score may be longer" if role == "reference" else "a deterministic run cannot change its limits"
        raise ConfigError(f"{less}, and {why}: free memory, or begin a run with engine.context = {can.context}")
    return [f"{less}: sequences that begin from now on end there"]


def adapted(engine: Engine, can: Capabilities) -> Engine:
    """The engine itself, or one that stamps versions in its place if it does not do so."""
    return engine if can.token_versions else cast(Engine, StampedEngine(engine))


class StampedEngine:
    """An engine whose completions get the version that was served at their request.

    A commit may come while it samples, so this is the oldest version that a token may be of.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._served = Version(-1)  # nothing is sampled before the first publication

    async def update(self, update: WeightUpdate) -> Version:
        self._served = await self._engine.update(update)
        return self._served

    async def generate(self, request: GenerateRequest) -> Completion:
        oldest = self._served
        completion = await self._engine.generate(request)
        versions = np.full(len(completion.tokens), oldest.step, np.int32)
        return replace(completion, versions=versions, sources=(oldest,))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)
