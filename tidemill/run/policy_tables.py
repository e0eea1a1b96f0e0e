"""Settings of one policy among several, and which environments and algorithms are each policy's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field, field_validator, model_validator

from tidemill.algorithms.algorithm_settings import AlgorithmSettings
from tidemill.algorithms.mixture import COMMON
from tidemill.core.config import Config, build, dump
from tidemill.envs.environment_settings import AnyEnv, whole_algorithm
from tidemill.trainer.trainer_kinds import LoraSettings

ONLY = "policy"  # the name of a run's policy where the recipe names none


class PolicySettings(Config):
    """One of several policies of a run: an adapter or a model that is trained, or one that is served as it is."""

    lr: float | None = Field(default=None, gt=0, description="Learning rate of this policy. none: trainer.lr")
    algorithm: dict[str, Any] = Field(
        default={}, description="Algorithm of this policy's groups: a preset or a table. Empty: the recipe's"
    )
    lora: dict[str, Any] = Field(
        default={}, description="Adapter of this policy: a table with the keys of trainer.lora. Empty: trainer.lora"
    )
    frozen: str | None = Field(
        default=None,
        description="Folder of an adapter or a model, or RUN/NAME@vN of another run, served as it is and never trained. "
        "none: this policy is trained",
    )

    @field_validator("algorithm", mode="before")
    @classmethod
    def _resolved(cls, given: Any) -> Any:
        return whole_algorithm(given)

    @field_validator("lora", mode="before")
    @classmethod
    def _whole(cls, given: Any) -> Any:
        """The adapter's table with every default filled in, as `trainer.lora` is."""
        return dump(build(LoraSettings, given)) if isinstance(given, dict) and given else given or {}

    @model_validator(mode="after")
    def _never_trained(self) -> PolicySettings:
        if self.frozen is not None and (given := self.model_dump(exclude={"frozen"}, exclude_defaults=True)):
            raise ValueError(
                f"frozen = {self.frozen!r} with {next(iter(given))}: a frozen policy is served as it is and never trained; "
                f"leave {next(iter(given))} out, or leave frozen out"
            )
        return self

    @property
    def own_algorithm(self) -> AlgorithmSettings | None:
        return AlgorithmSettings.model_validate(self.algorithm) if self.algorithm else None

    @property
    def own_lora(self) -> LoraSettings | None:
        return LoraSettings.model_validate(self.lora) if self.lora else None


Policies = Mapping[str, PolicySettings]


def trained(policies: Policies) -> tuple[str, ...]:
    """The names of the trained policies of a recipe with this table."""
    return tuple(name for name, each in policies.items() if each.frozen is None) if policies else (ONLY,)


def by_environment(policies: Policies, environments: Sequence[AnyEnv]) -> dict[str, str]:
    """The policy that plays each environment, by the environment's name; "" is the name of a single one."""
    (first, *_) = trained(policies) or ("",)
    return {each.name: each.policy if policies and each.policy else first for each in environments}


def algorithms_of(
    policies: Policies, environments: Sequence[AnyEnv], common: AlgorithmSettings
) -> dict[str, dict[str, AlgorithmSettings]]:
    """The algorithms of each trained policy by environment; COMMON applies to its environments without their own.

    common: the recipe's, for policies without their own.
    """
    played, found = by_environment(policies, environments), dict[str, dict[str, AlgorithmSettings]]()
    for policy in trained(policies):
        own = {each.name: each.own_algorithm for each in environments if played[each.name] == policy}
        given = policies[policy].own_algorithm if policies else None
        rest = {} if all(own.values()) else {COMMON: given or common}
        found[policy] = rest | {name: each for name, each in own.items() if each is not None}
    return found
