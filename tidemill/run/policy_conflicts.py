"""Refusals of recipes with several policies, each in one sentence: what is given, why it does not go, what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from tidemill.algorithms.algorithm_settings import AlgorithmSettings
from tidemill.core.errors import ConfigError
from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.envs.environment_settings import environments_of
from tidemill.models.adapter_config import AdapterConfig, BaseDtype
from tidemill.run.frozen_folders import frozen_folder, is_model
from tidemill.run.policy_tables import ONLY, trained
from tidemill.trainer.trainer_kinds import LoraSettings, TrainerSettings

if TYPE_CHECKING:
    from tidemill.run.recipe import RunConfig

RESERVED = (ONLY, "reference", "base", "mean", "initial")  # names of what else a run has or reports
NAME = re.compile(r"[A-Za-z0-9_-]+")


def policy_conflicts(config: RunConfig) -> Iterator[str]:
    """Sentences on what does not go together in a recipe; the first ones decide whether the others can be asked."""
    if not config.policies:
        yield from _named_without_table(config)
        return
    yield from chain(_names(config), _environments(config), _weights(config), _parts(config), _algorithms(config))


def _named_without_table(config: RunConfig) -> Iterator[str]:
    for env in environments_of(config.env):
        if env.policy:
            yield (
                f"{_of(env.name)}policy = {env.policy!r} and there is no table policies: give policies = "
                f"{{ {env.policy} = {{}} }}, or leave policy out"
            )


def _names(config: RunConfig) -> Iterator[str]:
    for name in config.policies:
        if not NAME.fullmatch(name) or name in RESERVED:
            yield (
                f"policies names {name!r}: expected a name of letters, digits, _ and -, and none of "
                f"{', '.join(RESERVED)}; give this policy another name"
            )
        if (other := f"{name}-adapter") in config.policies:
            yield f"policies {name!r} and {other!r}: an adapter of the first is exported as {other!r}; rename the second"
    if not trained(config.policies):
        yield "policies names only frozen ones, so there is nothing to train: add one without frozen, such as solver = {}"


def _environments(config: RunConfig) -> Iterator[str]:
    names, used = trained(config.policies), set[str]()
    for env in environments_of(config.env):
        where, known = _of(env.name), " or ".join(map(repr, names))
        if not env.policy and len(names) > 1:
            yield f"{where}policy is not given, and {len(names)} policies are trained: give policy = {known}"
        if env.policy and env.policy not in config.policies:
            yield f"{where}policy = {env.policy!r}: the table policies has no such policy; expected {known}"
        if env.policy in config.frozen_policies:
            yield (
                f"{where}policy = {env.policy!r} is frozen, and what it samples could train nothing: give policy = {known}; "
                f"an environment asks a frozen policy by chat.ask({env.policy!r}, message)"
            )
        used.add(config.policy_of[env.name])
    for name in names:
        if name not in used:
            yield (
                f"policies.{name} plays no environment, so it would never be trained: give an environment "
                f"policy = {name!r}, or leave policies.{name} out"
            )


def _weights(config: RunConfig) -> Iterator[str]:
    if not isinstance(config.trainer, TrainerSettings):
        yield (
            f"trainer.kind = {config.trainer.kind_name!r} with policies: it trains one policy; set trainer.kind = 'native', "
            "or leave policies out"
        )
        return
    lora = config.trainer.lora
    if lora is not None and lora.publish != "adapter":
        yield "policies with trainer.lora.publish = 'merged': engines serve them as adapters side by side; leave publish out"
    for name, each in config.policies.items():
        own = each.own_lora
        if own is not None and lora is None:
            yield (
                f"policies.{name}.lora without trainer.lora: all policies are adapters, or all are whole models; set "
                f"trainer.lora.rank = 16, or leave policies.{name}.lora out"
            )
        elif own is not None and lora is not None:
            yield from _own_adapter(name, own, lora)
        if each.frozen is not None:
            yield from _frozen(config, name, each.frozen, "float32" if lora is None else lora.base_dtype)


def _own_adapter(name: str, own: LoraSettings, common: LoraSettings) -> Iterator[str]:
    for key in ("publish", "base_dtype"):
        if getattr(own, key) != getattr(common, key):
            yield (
                f"policies.{name}.lora.{key} = {getattr(own, key)!r} and trainer.lora.{key} = {getattr(common, key)!r}: all "
                "policies are adapters on one model; give both the same"
            )


def _frozen(config: RunConfig, name: str, given: str, base_dtype: BaseDtype) -> Iterator[str]:
    """base_dtype: of the model that adapters are added to."""
    try:
        folder = frozen_folder(given)
    except ConfigError as missing:
        yield f"policies.{name}.frozen = {missing}"
        return
    if is_model(folder):
        return
    said = f"policies.{name}.frozen = {given!r}"
    held = AdapterConfig.from_folder(folder).base_dtype
    if held not in ("float32", base_dtype):  # PEFT does not write how the base was held
        yield (
            f"{said} was trained on a base in {held}, and trainer.lora.base_dtype = {base_dtype!r}: set "
            f"trainer.lora.base_dtype = {held!r}"
        )
    yield from warmed_base(config, said)


def warmed_base(config: RunConfig, given: str) -> Iterator[str]:
    """Refusal of an adapter that exists, `given` so in the recipe, on a base that a warm-up would change first."""
    if config.warmup.accuracy:
        yield (
            f"{given} with warmup.accuracy = {config.warmup.accuracy:g}: the warm-up changes the model that this adapter "
            "was trained on; leave the warm-up out, and take as the model the one that the adapter is of"
        )


def _parts(config: RunConfig) -> Iterator[str]:
    """Parts of a run that do not know several policies."""
    engine = config.engine
    if config.deterministic:
        yield "deterministic = true with policies: their bits depend on which of them sample together; leave one of both out"
    if not isinstance(engine, EngineSettings):
        yield (
            f"engine.kind = {engine.kind_name!r} with policies: only the engine of kind 'native' serves several policies; "
            "set engine.kind = 'native'"
        )
    elif engine.batch_invariant and config.side_by_side:
        yield "engine.batch_invariant = true with policies: its kernels serve one adapter; leave batch_invariant out"
    if config.trainer.ranks > 1:
        yield f"trainer.ranks = {config.trainer.ranks} with policies: one process trains them all; set trainer.ranks = 1"
    if config.placement.share == "sleep":
        yield (
            "placement.share = 'sleep' with policies: engines do not give back the weights of several policies; set "
            "placement.share = 'beside'"
        )


def _algorithms(config: RunConfig) -> Iterator[str]:
    every = [(name, each) for name, own in config.policy_algorithms.items() for each in own.values()]
    for name, each in every:
        if each.critic is not None:
            yield (
                f"{_whose(name, each)} has a critic: a trainer of several policies has none; take an algorithm without "
                "one, such as grpo"
            )
        if each.given:
            yield (
                f"{_whose(name, each)} learns the tasks' own replies (given = {each.given!r}), and policies are trained on "
                "what they sample; leave policies out, or take another algorithm"
            )
        if each.reference is not None and each.reference.every:
            yield (
                f"{_whose(name, each)} has reference.every = {each.reference.every}: the reference of several policies is "
                "the model that they began as, and stays what it is; leave every out"
            )
        if each.reference is not None and each.reference.model != "initial":
            yield (
                f"{_whose(name, each)} has reference.model = {each.reference.model!r}: the reference of several policies is "
                "the model that they began as; leave reference.model out"
            )
    for name, each in config.policies.items():
        if each.algorithm and all(
            env.algorithm for env in environments_of(config.env) if config.policy_of[env.name] == name
        ):
            yield (
                f"policies.{name}.algorithm = {each.algorithm['name']!r} applies to no group: each of its environments has "
                "its own; leave it out"
            )


def _whose(policy: str, algorithm: AlgorithmSettings) -> str:
    return f"the algorithm of policy {policy!r} ({algorithm.name})"


def _of(environment: str) -> str:
    return f"environment {environment!r}: " if environment else "env."
