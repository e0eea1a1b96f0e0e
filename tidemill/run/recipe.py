"""A recipe: everything that one run is, in one typed tree.

Each table is the settings class of the component it names. There is no torch here: the command line reads recipes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, model_validator

from tidemill.algorithms.algorithm_settings import AlgorithmSettings, CriticSettings, ReferenceSettings
from tidemill.algorithms.policy_algorithms import check_policies
from tidemill.algorithms.presets import ATTEMPTS, PRESETS
from tidemill.core.config import Config, build, load
from tidemill.engine.engine_kinds import BaseEngineSettings
from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.engine.remote.server_settings import ServerSettings
from tidemill.envs.environment_settings import (
    NO_REWARD,
    AgentSettings,
    EnvSettings,
    RowsSettings,
    ScoringSettings,
    environments_of,
    parse_env,
)
from tidemill.models.adapter_config import BaseDtype
from tidemill.run.foreign_keys import ELSEWHERE, NOT_YET, NOT_YET_VALUES
from tidemill.run.frozen_folders import frozen_folder, known_model
from tidemill.run.lora_conflicts import lora_conflicts
from tidemill.run.placement_kinds import BasePlacementSettings, PlacementSettings
from tidemill.run.policy_conflicts import policy_conflicts
from tidemill.run.policy_tables import ONLY, PolicySettings, algorithms_of, by_environment, trained
from tidemill.run.recipe_files import found
from tidemill.run.recipe_tables import (
    DataSettings,
    EvalSettings,
    RecordSettings,
    RolloutSettings,
    SuperviseSettings,
    WarmupSettings,
)
from tidemill.trainer.trainer_kinds import BaseTrainerSettings, LoraSettings, TrainerSettings

SHORT: dict[str, Callable[[str], Any]] = {
    "env": parse_env,
    "algorithm": lambda name: {"name": name},
    "placement": lambda kind: {"kind": kind},
    "supervise": lambda resume: {"resume": resume},
}
"""Keys that may be a plain value, and the tables these stand for."""


class RunConfig(Config):
    """The whole recipe, checked. Numbers that follow from it are in `planner.plan`."""

    called_elsewhere: ClassVar[Mapping[str, str]] = ELSEWHERE
    not_yet: ClassVar[Mapping[str, str]] = NOT_YET
    not_yet_values: ClassVar[Mapping[str, Mapping[str, str]]] = NOT_YET_VALUES

    run_dir: Path = Field(description="Folder of the run's record. Left out: runs/RECIPE")
    model: str = Field(
        description='Model to train: a Hugging Face folder, org/name or org/name@revision on the hub, or a random "new:SIZE"'
    )
    env: EnvSettings
    algorithm: AlgorithmSettings = AlgorithmSettings.preset("grpo")
    steps: int = Field(default=100, ge=1, description="Steps of the whole run, each on rollout.groups groups")
    max_lag: int = Field(default=1, ge=0, description="Most versions that sampling lags behind training. 0: synchronous")
    seed: int = Field(default=0, ge=0, description="Seed that every random number of the run derives from")
    profile: bool = Field(default=False, description="Record the operators of two steps in profile.json.gz")
    deterministic: bool = Field(default=False, description="Reach equal weights to the last bit. Needs float32 on the CPU")
    placement: BasePlacementSettings = PlacementSettings()
    rollout: RolloutSettings = RolloutSettings()
    data: DataSettings = DataSettings()
    engine: BaseEngineSettings = EngineSettings()
    reference_engine: dict[str, Any] = Field(
        default={}, description="Engine that serves the reference: a table with the keys of [engine]. Left out: one like it"
    )
    trainer: BaseTrainerSettings = TrainerSettings()
    policies: dict[str, PolicySettings] = Field(
        default={}, description="Several policies by name: adapters on one model, or whole models"
    )
    scoring: ScoringSettings = ScoringSettings()
    warmup: WarmupSettings = WarmupSettings()
    eval: EvalSettings = EvalSettings()
    record: RecordSettings = RecordSettings()
    supervise: SuperviseSettings = SuperviseSettings()

    @property
    def judged(self) -> bool:
        """False when some environment's rows are only learnt from and have no reward."""
        return not any(isinstance(e, RowsSettings) and e.reward in NO_REWARD for e in environments_of(self.env))

    @property
    def algorithms(self) -> dict[str, AlgorithmSettings]:
        """Algorithm settings by environment; COMMON applies to environments without their own.

        With several policies by POLICY/ENVIRONMENT, and by POLICY for its environments without their own.
        """
        found = self.policy_algorithms
        if not self.policies:
            return found[ONLY]
        return {f"{name}/{env}" if env else name: each for name, own in found.items() for env, each in own.items()}

    @property
    def policy_algorithms(self) -> dict[str, dict[str, AlgorithmSettings]]:
        """Algorithm settings of each trained policy by environment, or COMMON."""
        return algorithms_of(self.policies, environments_of(self.env), self.algorithm)

    @property
    def policy_of(self) -> dict[str, str]:
        """The policy that plays each environment, by the environment's name."""
        return by_environment(self.policies, environments_of(self.env))

    @property
    def trained_policies(self) -> tuple[str, ...]:
        return trained(self.policies)

    @property
    def frozen_policies(self) -> dict[str, str]:
        """The policies that are served and never trained, by name: a folder, or a version as RUN/NAME@vN."""
        return {name: each.frozen for name, each in self.policies.items() if each.frozen is not None}

    @property
    def frozen_folders(self) -> dict[str, Path]:
        """The folders of the frozen policies. Raises ConfigError for a version that its run does not hold."""
        return {name: frozen_folder(each) for name, each in self.frozen_policies.items()}

    @property
    def side_by_side(self) -> tuple[str, ...]:
        """The policies that are adapters on the model, which each engine serves together; () without a table `policies`."""
        trained = tuple(self.adapters) if self.policies else ()
        return (*trained, *(name for name, each in self.frozen_policies.items() if not known_model(each)))

    @property
    def whole_policies(self) -> tuple[str, ...]:
        """The policies that are whole models, each with engines of its own; () without a table `policies`."""
        return tuple(name for name in self.policies if name not in self.side_by_side)

    @property
    def engine_pools(self) -> int:
        """Pools of placement.engines engines each: one for all adapters, and one for each whole model."""
        return max(1, bool(self.side_by_side) + len(self.whole_policies))

    @property
    def reference(self) -> ReferenceSettings | None:
        """The reference policy that the algorithms ask for, or None. All that ask for one ask for the same."""
        return next((each.reference for each in self.algorithms.values() if each.reference), None)

    @property
    def serves_reference(self) -> BaseEngineSettings:
        """Settings of the engines that serve the reference."""
        return build(BaseEngineSettings, self.reference_engine) if self.reference_engine else self.engine

    @property
    def critic(self) -> CriticSettings | None:
        return next((each.critic for each in self.algorithms.values() if each.critic), None)

    @property
    def offline(self) -> str:
        """The kind of replies that are learnt offline, without sampling, or "": see `AlgorithmSettings.given`."""
        return next(iter(self.algorithms.values())).given

    @property
    def scores(self) -> bool:
        return any(each.scores for each in self.algorithms.values())

    @classmethod
    def expanded(cls, tree: dict[str, Any]) -> dict[str, Any]:
        return {
            key: SHORT[key](value) if key in SHORT and not isinstance(value, dict | Config) else value
            for key, value in tree.items()
        }

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        tree = cls.expanded(given)
        if isinstance(chosen := tree.get("algorithm"), dict) and "name" not in chosen:
            tree = {**tree, "algorithm": {"name": "grpo", **chosen}}  # the default algorithm, too, when the table names none
        tree = _as_offline(tree)
        return _exactly(tree) if tree.get("deterministic") is True else tree

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        for conflict in policy_conflicts(self):
            raise ValueError(conflict)
        for each in self.algorithms.values():
            each.check(self.rollout.groups, self.rollout.group_size)
        check_policies(self.policy_algorithms)
        for conflict in chain(
            self._unused_algorithm(),
            self._rank_conflicts(),
            self._server_conflicts(),
            self._data_conflicts(),
            self._offline_conflicts(),
            self._window_conflicts(),
            self._reference_conflicts(),
            lora_conflicts(self),
        ):
            raise ValueError(conflict)
        return self

    def _unused_algorithm(self) -> Iterator[str]:
        of_policies = [name for name, each in self.policies.items() if each.algorithm]
        played = self.policy_of
        own = [env.algorithm or played[env.name] in of_policies for env in environments_of(self.env)]
        if all(own) and self.algorithm != RunConfig.model_fields["algorithm"].default:
            yield f"algorithm = {self.algorithm.name!r} applies to no group: every environment has its own; leave it out"

    def _rank_conflicts(self) -> Iterator[str]:
        if self.trainer.ranks > 1 and self.placement.kind_name == "inline":
            yield (
                f"placement.kind = 'inline' has one process, and trainer.ranks = {self.trainer.ranks} need one each: set "
                "placement.kind = 'local', or trainer.ranks = 1"
            )

    def _server_conflicts(self) -> Iterator[str]:
        if not isinstance(self.engine, ServerSettings) or not self.engine.url:
            return
        addresses, engines = [url.rstrip("/") for url in self.engine.urls], self.placement.engines
        if twice := next((url for i, url in enumerate(addresses) if url in addresses[:i]), None):
            yield f"engine.url names {twice!r} twice: each engine updates a server of its own; name another one"
        if len(addresses) < engines:
            yield (
                f"engine.url names {len(addresses)} server{'s' * (len(addresses) > 1)}, and placement.engines = {engines}: "
                "each engine updates a server of its own; name one for each, or lower placement.engines"
            )
        if self.placement.reference_engines and self.serves_reference is self.engine:
            yield (
                f"placement.reference_engines = {self.placement.reference_engines}: the servers of the policy cannot serve "
                "the reference, because their weights change; set reference_engine, or placement.reference_engines = 0"
            )

    def _data_conflicts(self) -> Iterator[str]:
        replay, groups = self.data.replay, self.rollout.groups
        for env in environments_of(self.env):
            if getattr(env, "reward_weights", ()) and (env.own_algorithm or self.algorithm).advantage == "gdpo":
                yield (
                    "env.reward_weights does not go with gdpo, which weighs each reward after it is normalised: give "
                    "algorithm = { name = 'gdpo', weights = { NAME = 0.5 } }"
                )
            if isinstance(env, AgentSettings) and env.limit_s >= self.rollout.episode_s:
                yield (
                    f"env.limit_s = {env.limit_s:g} is not less than rollout.episode_s = {self.rollout.episode_s:g}, at "
                    "which an episode is an infrastructure error, so that no agent would ever be late: lower it, or raise "
                    "rollout.episode_s"
                )
        if self.deterministic and (self.data.order != "shuffled" or self.data.retire):
            yield (
                f"deterministic = true: data.order = {self.data.order!r} with data.retire = {self.data.retire:g} chooses by "
                "what has come back when a task is asked for, which depends on time; use 'shuffled' and 0"
            )
        if 0 < replay.share * groups < 1:
            yield (
                f"data.replay.share = {replay.share:g} of rollout.groups = {groups} is less than one group: raise it to "
                f"{1 / groups:g} at least, or set 0"
            )

    def _offline_conflicts(self) -> Iterator[str]:
        if not (given := self.offline):
            if not self.judged:
                yield (
                    "env.reward is empty: expected exact, regex, numeric, last_boxed, math, code, model, FILE.py:FUNCTION; "
                    "only what learns the rows' own replies (sft, dpo, ipo, orpo, simpo, kto) needs none"
                )
            return
        if self.warmup.accuracy:
            yield (
                f"warmup.accuracy = {self.warmup.accuracy:g} does not go with given = {given!r}: take as the model the "
                "final/ of a run of sft"
            )
        if self.data != DataSettings():
            yield f"data.order, retire and replay go by what a policy earned, and given = {given!r} samples nothing"
        fresh = RolloutSettings()
        for name in OF_SAMPLING:
            if getattr(self.rollout, name) != getattr(fresh, name):
                yield f"rollout.{name} does not apply to given = {given!r}: nothing is sampled, and evaluation is greedy"

    def _window_conflicts(self) -> Iterator[str]:
        window, widest = self.rollout.window, self.max_lag * self.rollout.groups + 1
        if self.deterministic and window > 1:
            yield f"deterministic = true: rollout.window = {window} takes groups as they finish; set it to 1"
        if window > widest:
            yield f"rollout.window = {window}: at most max_lag * rollout.groups + 1 = {widest} keeps the bound"

    @property
    def adapters(self) -> dict[str, LoraSettings]:
        """The adapter of each trained policy; empty where whole weights are trained."""
        lora = self.trainer.lora if isinstance(self.trainer, TrainerSettings) else None
        own = {name: each.own_lora for name, each in self.policies.items()}
        return {} if lora is None else {name: own.get(name) or lora for name in self.trained_policies}

    @property
    def adapter_rank(self) -> int:
        """The highest rank of the adapters that engines are sent; 0: they are sent whole weights."""
        return max((each.config.highest_rank for each in self.adapters.values() if each.publish == "adapter"), default=0)

    @property
    def adapter_base(self) -> BaseDtype:
        """The numbers of the layers' matrices to which engines add these adapters."""
        lora = self.trainer.lora if isinstance(self.trainer, TrainerSettings) else None
        return lora.base_dtype if lora is not None and self.adapter_rank else "float32"

    def _reference_conflicts(self) -> Iterator[str]:
        reference, r, count = self.reference, self.rollout, self.placement.reference_engines
        given = f"placement.reference_engines = {count}"
        if self.reference_engine and not count:
            yield "reference_engine is given and placement.reference_engines = 0: set the number of engines, or leave it out"
        if self.reference_engine and self.serves_reference.kind_name != "native" and self.deterministic:
            yield "deterministic = true: the reference must be served by the native engine; leave out reference_engine"
        if count and reference is None:
            yield f"{given}: there is no reference to serve; set algorithm.reference, or leave the engines out"
        if count and reference is not None and reference.every:
            yield f"{given}: a reference that is served never moves; set algorithm.reference.every = 0, or 0 engines for it"
        if count and (r.top_p < 1 or r.top_k or r.min_p):
            yield (
                f"{given}: an engine scores over the whole vocabulary, and rollout.top_p, top_k and min_p leave out a part "
                "of it; leave them off, or set 0 engines for the reference"
            )


OF_SAMPLING = ("temperature", "top_p", "top_k", "min_p")

EXACT = {
    "engine": {"kind": "native", "batch_invariant": True, "in_flight": "finish", "dtype": "float32", "device": "cpu"},
    "trainer": {"kind": "native", "dtype": "float32", "serving_dtype": "float32", "device": "cpu"},
}
"""Values that `deterministic = true` sets."""


def _exactly(tree: dict[str, Any]) -> dict[str, Any]:
    for table, settled in EXACT.items():
        given = tree.get(table, {})
        if isinstance(given, Config):
            given = given.model_dump()
        elif not isinstance(given, dict):
            continue  # validation refuses a value that is no table
        for key, value in settled.items():
            if given.get(key, value) not in (value, "auto"):
                raise ValueError(
                    f"{table}.{key} = {given[key]!r} does not go with deterministic = true, which needs {value!r}"
                )
        tree = {**tree, table: {**given, **settled}}
    return tree


def _as_offline(tree: dict[str, Any]) -> dict[str, Any]:
    """Set the group size of offline replies: the number of attempts that a task holds."""
    chosen, rollout = tree.get("algorithm"), tree.get("rollout", {})
    if isinstance(chosen, dict):
        preset = PRESETS.get(str(chosen.get("name")), {})
        given = str(chosen.get("given", preset.get("given", "")))
    else:
        given = chosen.given if isinstance(chosen, AlgorithmSettings) else ""
    if isinstance(rollout, Config):
        rollout = rollout.model_dump(exclude_unset=True)
    if given not in ATTEMPTS or not isinstance(rollout, dict):
        return tree  # validation refuses an unknown kind, or a value that is no table
    if (size := rollout.get("group_size", ATTEMPTS[given])) != ATTEMPTS[given]:
        raise ValueError(
            f"rollout.group_size = {size} does not go with given = {given!r}, where a task holds {ATTEMPTS[given]}: "
            "leave it out"
        )
    return {**tree, "rollout": {**rollout, "group_size": ATTEMPTS[given]}}


def load_recipe(files: Sequence[str | Path], overrides: Iterable[str] = (), base: dict[str, Any] | None = None) -> RunConfig:
    """Build the recipe from `base`, then the files, then the overrides; later wins.

    run_dir is runs/FILE by default. Files that they name may lie beside the recipe. Raises ConfigError.
    """
    named = {"run_dir": f"runs/{Path(files[0]).stem}"} if files else {}
    return found(load(RunConfig, files, overrides, named | (base or {})), [Path(each).parent for each in files])
