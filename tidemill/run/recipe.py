"""A recipe: everything that one run is, in one typed tree. Each table is the settings class of the component it names.

`load_recipe(files, overrides)` reads TOML files and `key.sub=value` overrides; `RunConfig` is what is written, resolved, to
the run folder. No torch here: the command line reads recipes long before anything is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from tidemill.algorithms.algorithm_settings import AlgorithmSettings, CriticSettings, ReferenceSettings
from tidemill.algorithms.mixture import COMMON, check_mixture
from tidemill.algorithms.presets import ATTEMPTS, PRESETS
from tidemill.core.config import Config, load
from tidemill.core.errors import ConfigError
from tidemill.core.hardware import usable_cores
from tidemill.core.types import MIN_TEMPERATURE
from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.envs.curriculum import Order
from tidemill.envs.environment_settings import (
    NO_REWARD,
    EnvironmentWorkers,
    EnvSettings,
    RowsSettings,
    environments_of,
    parse_env,
)
from tidemill.envs.reward_workers.scoring_settings import ScoringSettings
from tidemill.observability.observability_settings import LogSettings
from tidemill.run.foreign_keys import ELSEWHERE, NOT_YET, NOT_YET_VALUES
from tidemill.run.recipe_files import found, same_file
from tidemill.trainer.trainer_settings import TrainerSettings
from tidemill.weight_sync.sync_settings import SyncSettings


class PlacementSettings(Config):
    """Where the parts run, and what carries the weights between them."""

    kind: Literal["local", "inline"] = "local"  # processes on this machine, or everything in one process
    engines: int = Field(default=1, ge=1)
    engine_threads: int = Field(default=1, ge=1)  # of each; all together may have more than there are cores, and share them
    trainer_threads: int = Field(
        default=1, ge=1
    )  # the same: whoever computes alone has all of his, see `runtime.cpu_sharing`
    # The trainer begins a step with the groups that have finished, where the algorithm allows it; auto: where there is a
    # core for each thread of trainer and engines, or these name different devices
    stream: bool | Literal["auto"] = "auto"
    reference_engines: int = Field(default=0, ge=0)  # processes that serve algorithm.reference; 0: the trainer holds it too
    sync: SyncSettings = SyncSettings()
    environment: EnvironmentWorkers = EnvironmentWorkers()


class RolloutSettings(Config):
    """What is sampled for each step."""

    groups: int = Field(default=16, ge=1)  # groups (tasks) a step
    group_size: int = Field(default=8, ge=1)  # samples of each task
    max_tokens: int = Field(default=256, ge=1)  # of one reply
    temperature: float = Field(default=1.0, ge=MIN_TEMPERATURE)  # greedy tokens have no logprob to train on
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    min_p: float = Field(default=0.0, ge=0, lt=1)
    window: int = Field(default=1, ge=1)  # look-ahead past the oldest unfinished group, see `buffer`
    episode_s: float = Field(default=600.0, gt=0)  # an episode that takes longer ends as an infrastructure error


class ReplaySettings(Config):
    """Groups that are trained once more, beside a step's own: see `replay_buffer`. Off while `share` is 0."""

    share: float = Field(default=0.0, ge=0, le=4)  # of the step's groups, how many come on top
    within: int = Field(default=16, ge=1)  # steps back; max_lag does not bound these
    times: int = Field(default=1, ge=1)  # that a group is trained again, at most


class DataSettings(Config):
    """Which tasks are given."""

    order: Order = "shuffled"  # frontier, easy_first, mixed: by each task's pass rate so far, see `envs.curriculum`
    retire: float = Field(default=0.0, ge=0, le=1)  # a task whose whole group passed at this rate is not given again; 0: off
    replay: ReplaySettings = ReplaySettings()


class WarmupSettings(Config):
    """Supervised training on the tasks' own answers before reinforcement learning. Off while `accuracy` is 0."""

    accuracy: float = Field(default=0.0, ge=0, le=1)  # train until greedy accuracy on training tasks reaches this;
    steps: int = Field(default=5000, ge=1)  # where it has not after so many, the run ends with an error
    lr: float = Field(default=1e-3, gt=0)
    batch: int = Field(default=64, ge=1)  # rows a step

    @model_validator(mode="before")
    @classmethod
    def _by_steps(cls, given: Any) -> Any:
        if isinstance(given, dict) and "seconds" in given:
            raise ValueError(
                f"seconds = {given['seconds']!r} is no key any more, because a warm-up does not end by the clock: it ends "
                "at warmup.accuracy, after warmup.steps at the latest; set warmup.steps, or leave it out"
            )
        return given


class EvalSettings(Config):
    """Greedy evaluation on held-out tasks, each time on one version."""

    every: int = Field(default=20, ge=0)  # steps; 0: only before and after
    tasks: int = Field(default=128, ge=1)  # while training
    final_tasks: int = Field(default=1024, ge=1)  # before the first and after the last step


class RecordSettings(LogSettings):
    """What is kept of a run, besides the ledger and the metrics, which always are."""

    checkpoint_every: int = Field(default=50, ge=0)  # steps; 0: only at the end
    checkpoints: int = Field(default=2, ge=1)  # kept; a resume falls back on an older one when the newest is damaged
    keep_every: int = Field(default=0, ge=0)  # steps; checkpoints of every such step are kept for good; 0: of none
    probe_every: int = Field(default=5, ge=0)  # steps between matched-version logprob probes; 0: never


class SuperviseSettings(Config):
    """How processes are watched, and what is done when one ends."""

    resume: bool = False  # go on by itself when the trainer has ended
    restarts: int = Field(default=5, ge=0)  # of an engine, or resumes of the run, within the window; then the run stops
    window_s: float = Field(default=600.0, gt=0)
    backoff_s: float = Field(default=1.0, ge=0)  # before a restart of what did not last, and before the next twice as long
    heartbeat_s: float = Field(default=1.0, gt=0)  # between two heartbeats
    silent_s: float = Field(default=60.0, gt=0)  # without an answer, before a process is killed; more than an engine's step
    stuck_s: float = Field(default=900.0, gt=0)  # in a call without progress, before a process is killed


SHORT: dict[str, Callable[[str], Any]] = {
    "env": parse_env,
    "algorithm": lambda name: {"name": name},
    "placement": lambda kind: {"kind": kind},
    "supervise": lambda resume: {"resume": resume},
}
"""Keys that may be a plain value, and the tables these stand for."""


class RunConfig(Config):
    called_elsewhere: ClassVar[Mapping[str, str]] = ELSEWHERE
    not_yet: ClassVar[Mapping[str, str]] = NOT_YET
    not_yet_values: ClassVar[Mapping[str, Mapping[str, str]]] = NOT_YET_VALUES

    run_dir: Path  # what is recorded; runs/RECIPE unless it is given
    model: str  # a Hugging Face folder, a name on the hub (org/name or org/name@revision), or "new:SIZE": a random one
    env: EnvSettings
    algorithm: AlgorithmSettings = AlgorithmSettings.preset("grpo")
    steps: int = Field(default=100, ge=1)  # of the whole run, each of `rollout.groups` groups
    max_lag: int = Field(default=1, ge=0)  # versions that a sample may be old when it is trained on; 0: synchronous
    seed: int = Field(default=0, ge=0)
    profile: bool = False  # which operators engines and trainer ran in two steps: profile.json.gz, see `operator_profiler`
    deterministic: bool = False  # the same weights to the last bit, whatever interrupts the run: float32 on the CPU
    placement: PlacementSettings = PlacementSettings()
    rollout: RolloutSettings = RolloutSettings()
    data: DataSettings = DataSettings()
    engine: EngineSettings = EngineSettings()
    trainer: TrainerSettings = TrainerSettings()
    scoring: ScoringSettings = ScoringSettings()
    warmup: WarmupSettings = WarmupSettings()
    eval: EvalSettings = EvalSettings()
    record: RecordSettings = RecordSettings()
    supervise: SuperviseSettings = SuperviseSettings()

    @property
    def coarsest(self) -> str:
        """The dtype of the lowest precision that a logprob passes through, in the trainer or in an engine."""
        used = (self.trainer.dtype, self.trainer.serving_dtype, self.engine.dtype)
        return "bfloat16" if "bfloat16" in used else "float32"

    @property
    def judged(self) -> bool:
        """Whether everything can be judged: rows whose own replies are learnt need no reward."""
        return not any(isinstance(e, RowsSettings) and e.reward in NO_REWARD for e in environments_of(self.env))

    @property
    def algorithms(self) -> dict[str, AlgorithmSettings]:
        """By the environment whose groups each is of; COMMON is of all that have none of their own, where there are such."""
        own = {each.name: each.own_algorithm for each in environments_of(self.env)}
        common = {} if all(own.values()) else {COMMON: self.algorithm}
        return common | {name: each for name, each in own.items() if each is not None}

    @property
    def reference(self) -> ReferenceSettings | None:
        """Of the algorithm that asks for one; those that do ask for the same policy."""
        return next((each.reference for each in self.algorithms.values() if each.reference), None)

    @property
    def critic(self) -> CriticSettings | None:
        """The same of critics."""
        return next((each.critic for each in self.algorithms.values() if each.critic), None)

    @property
    def slots(self) -> int:
        """Groups that may be admitted and not trained yet, see `buffer`."""
        return (self.max_lag + 1) * self.rollout.groups - self.rollout.window + 1

    @property
    def replayed(self) -> int:
        """Groups of earlier steps that a step trains once more, at most."""
        return int(self.data.replay.share * self.rollout.groups)

    @property
    def given(self) -> str:
        """Which replies of the tasks' own are learnt, see `AlgorithmSettings.given`."""
        return next(iter(self.algorithms.values())).given

    @property
    def scores(self) -> bool:
        """Whether a reward model is trained."""
        return any(each.scores for each in self.algorithms.values())

    @property
    def shares_cores(self) -> bool:
        """Whether processes may compute with fewer threads than they were given: not where the bits of sums have to stay."""
        return self.placement.kind == "local" and not (self.deterministic or self.engine.batch_invariant)

    @property
    def lanes(self) -> int:
        """Micro-batches that the trainer may run at a time on a CPU: one where the bits of sums have to stay."""
        return self.placement.trainer_threads if self.shares_cores else 1

    @property
    def warming_up(self) -> RunConfig:
        """By which the processes of a warm-up are started: one engine and the trainer take turns on all cores. Where bits
        have to stay they have the threads that the recipe gives them: how many there are is in the bits of sums."""
        cores, given = usable_cores(), self.placement
        threads = (given.trainer_threads, given.engine_threads) if self.deterministic else (cores, cores)
        together = {"engines": 1, "trainer_threads": threads[0], "engine_threads": threads[1]}
        return self.model_copy(update={"placement": self.placement.model_copy(update=together)})

    @property
    def streams(self) -> bool:
        """Whether a step's gradient may be added up as its groups finish: not where the bits of sums have to stay."""
        asked = self.placement.stream
        return not self.deterministic and (self._apart if asked == "auto" else asked)

    @property
    def _apart(self) -> bool:
        """Whether there is a core for each of their threads, or trainer and engines name different devices."""
        p, given = self.placement, (self.trainer.device, self.engine.device)
        devices = {"cuda:0" if device == "cuda" else device for device in given}
        enough = p.trainer_threads + p.engines * p.engine_threads <= usable_cores()
        return p.kind == "local" and (enough or (len(devices) == 2 and "auto" not in devices))

    @property
    def updates(self) -> int:
        """Of the optimizer, in a step."""
        return max(each.updates.count for each in self.algorithms.values())

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
            tree = {**tree, "algorithm": {"name": "grpo", **chosen}}  # as where nothing of it is given
        tree = _as_given(tree)
        return _exactly(tree) if tree.get("deterministic") is True else tree

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        algorithms = self.algorithms
        for each in algorithms.values():
            each.check(self.rollout.groups, self.rollout.group_size)
        check_mixture(algorithms)
        if COMMON not in algorithms and self.algorithm != RunConfig.model_fields["algorithm"].default:
            raise ValueError(
                f"algorithm = {self.algorithm.name!r} applies to no group: every environment has its own; leave it out"
            )
        self._expect_weights()
        self._expect_order()
        self._expect_replay()
        self._expect_sampled_or_given()
        if self.deterministic and self.rollout.window > 1:
            raise ValueError(
                f"deterministic = true: rollout.window = {self.rollout.window} takes groups as they finish; set it to 1"
            )
        self._expect_servable()
        widest = self.max_lag * self.rollout.groups + 1
        if self.rollout.window > widest:
            raise ValueError(
                f"rollout.window = {self.rollout.window}: at most max_lag * rollout.groups + 1 = {widest} keeps the bound"
            )
        return self

    def _expect_servable(self) -> None:
        """That engines can say what the reference would."""
        reference, r, count = self.reference, self.rollout, self.placement.reference_engines
        if not count:
            return
        given = f"placement.reference_engines = {count}"
        if reference is None:
            raise ValueError(f"{given}: there is no reference to serve; set algorithm.reference, or leave the engines out")
        if reference.every:
            raise ValueError(
                f"{given}: a reference that is served never moves; set algorithm.reference.every = 0, or 0 engines for it"
            )
        if r.top_p < 1 or r.top_k or r.min_p:
            raise ValueError(
                f"{given}: an engine scores over the whole vocabulary, and rollout.top_p, top_k and min_p leave out a part "
                "of it; leave them off, or set 0 engines for the reference"
            )

    def _expect_weights(self) -> None:
        for env in environments_of(self.env):
            if getattr(env, "reward_weights", ()) and (env.own_algorithm or self.algorithm).advantage == "gdpo":
                raise ValueError(
                    "env.reward_weights does not go with gdpo, which weighs each reward after it is normalised: give "
                    "algorithm = { name = 'gdpo', weights = { NAME = 0.5 } }"
                )

    def _expect_order(self) -> None:
        if self.data.order == "easy_first" and not self.data.retire:
            raise ValueError(
                "data.order = 'easy_first' would give what is solved for ever: set data.retire, 0.9 for example, so that it "
                "goes on to what is harder"
            )
        if self.deterministic and (self.data.order != "shuffled" or self.data.retire):
            raise ValueError(
                f"deterministic = true: data.order = {self.data.order!r} with data.retire = {self.data.retire:g} chooses by "
                "what has come back when a task is asked for, which depends on time; use 'shuffled' and 0"
            )

    def _expect_replay(self) -> None:
        replay, groups = self.data.replay, self.rollout.groups
        if not replay.share:
            if replay != ReplaySettings():
                raise ValueError("data.replay.within and times apply to what is replayed: set data.replay.share, 0.25 say")
            return
        if self.replayed < 1:
            raise ValueError(
                f"data.replay.share = {replay.share:g} of rollout.groups = {groups} is less than one group: raise it to "
                f"{1 / groups:g} at least, or set 0"
            )

    def _expect_sampled_or_given(self) -> None:
        if not (given := self.given):
            if not self.judged:
                raise ValueError(
                    "env.reward is empty: expected exact, regex, numeric, last_boxed, math, model, or FILE.py:FUNCTION; "
                    "only what learns the rows' own replies (sft, dpo, ipo, orpo, simpo, kto) needs none"
                )
            return
        if self.warmup.accuracy:
            raise ValueError(
                f"warmup.accuracy = {self.warmup.accuracy:g} does not go with given = {given!r}: take as the model the "
                "final/ of a run of sft"
            )
        if self.data != DataSettings():
            raise ValueError(
                f"data.order, retire and replay go by what a policy earned, and given = {given!r} samples nothing"
            )
        fresh = RolloutSettings()
        if changed := [name for name in OF_SAMPLING if getattr(self.rollout, name) != getattr(fresh, name)]:
            raise ValueError(
                f"rollout.{changed[0]} does not apply to given = {given!r}: nothing is sampled, and evaluation is greedy"
            )


OF_SAMPLING = ("temperature", "top_p", "top_k", "min_p")

EXACT = {
    "engine": {"batch_invariant": True, "in_flight": "finish", "dtype": "float32", "device": "cpu"},
    "trainer": {"dtype": "float32", "serving_dtype": "float32", "device": "cpu"},
}
"""What `deterministic = true` settles."""


def _exactly(tree: dict[str, Any]) -> dict[str, Any]:
    for table, settled in EXACT.items():
        given = tree.get(table, {})
        if isinstance(given, Config):
            given = given.model_dump()
        elif not isinstance(given, dict):
            continue  # no table at all: refused as that
        for key, value in settled.items():
            if given.get(key, value) not in (value, "auto"):
                raise ValueError(
                    f"{table}.{key} = {given[key]!r} does not go with deterministic = true, which needs {value!r}"
                )
        tree = {**tree, table: {**given, **settled}}
    return tree


def _as_given(tree: dict[str, Any]) -> dict[str, Any]:
    """Where the tasks give the attempts, these are as many as a task holds."""
    chosen, rollout = tree.get("algorithm"), tree.get("rollout", {})
    if isinstance(chosen, dict):
        preset = PRESETS.get(str(chosen.get("name")), {})
        given = str(chosen.get("given", preset.get("given", "")))
    else:
        given = chosen.given if isinstance(chosen, AlgorithmSettings) else ""
    if isinstance(rollout, Config):
        rollout = rollout.model_dump(exclude_unset=True)
    if given not in ATTEMPTS or not isinstance(rollout, dict):
        return tree  # an unknown kind, and what is no table, are refused as that
    if (size := rollout.get("group_size", ATTEMPTS[given])) != ATTEMPTS[given]:
        raise ValueError(
            f"rollout.group_size = {size} does not go with given = {given!r}, where a task holds {ATTEMPTS[given]}: "
            "leave it out"
        )
    return {**tree, "rollout": {**rollout, "group_size": ATTEMPTS[given]}}


MOST_TOLD = 5  # differences between two recipes
MAY_CHANGE = frozenset({"run_dir", "steps", "placement", "eval", "profile", "record", "scoring", "supervise"})
"""Keys that may differ when a run goes on. Any other one would change what the recorded part of the run means."""


def load_recipe(files: Sequence[str | Path], overrides: Iterable[str] = (), base: dict[str, Any] | None = None) -> RunConfig:
    """`base`, then the files, then the overrides; later wins. Unless one says otherwise, run_dir is runs/FILE.

    A file that they name is looked for in the current folder first, then beside the recipe.
    """
    named = {"run_dir": f"runs/{Path(files[0]).stem}"} if files else {}
    return found(load(RunConfig, files, overrides, named | (base or {})), [Path(each).parent for each in files])


def check_same_run(old: dict[str, Any], new: dict[str, Any], folder: Path) -> None:
    """Refuse to go on with a run under a recipe that is not its own."""
    if new.get("deterministic"):
        threads = ("engine_threads", "trainer_threads")
        if any(old["placement"][key] != new["placement"][key] for key in threads):
            raise ConfigError(
                f"{folder} is deterministic: with other numbers of threads its sums would differ in their bits"
            )
        if len({bool(tree["placement"].get("reference_engines")) for tree in (old, new)}) == 2:
            raise ConfigError(
                f"{folder} is deterministic, and trainer and engines round differently: leave "
                "placement.reference_engines as it was"
            )
    was, now = ({k: v for k, v in tree.items() if k not in MAY_CHANGE} for tree in (old, new))
    if changed := list(_differences(was, now)):
        more = f" and {len(changed) - MOST_TOLD} more" if len(changed) > MOST_TOLD else ""
        raise ConfigError(
            f"{folder} holds a run of another recipe: {'; '.join(changed[:MOST_TOLD])}{more}. Use another run_dir, or "
            f"change only {', '.join(sorted(MAY_CHANGE - {'run_dir'}))}"
        )


def _differences(old: Any, new: Any, key: str = "") -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted(old.keys() | new.keys()):
            yield from _differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif old != new and not same_file(key, old, new):
        yield f"{key} was {old!r} and is {new!r}"
