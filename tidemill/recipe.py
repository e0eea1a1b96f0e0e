"""A recipe: everything that one run is, in one typed tree. Each table is the settings class of the component it names.

`load_recipe(files, overrides)` reads TOML files and `key.sub=value` overrides; `RunConfig` is what is written, resolved, to
the run folder. No torch here: the command line reads recipes long before anything is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from tidemill.algorithms.settings import AlgorithmSettings
from tidemill.config import Config, ConfigError, load
from tidemill.engine.settings import EngineSettings
from tidemill.envs.settings import EnvSettings, parse_env
from tidemill.observability.settings import LogSettings
from tidemill.scoring.settings import ScoringSettings
from tidemill.sync.settings import SyncSettings
from tidemill.trainer.settings import TrainerSettings
from tidemill.types import MIN_TEMPERATURE


class PlacementSettings(Config):
    """Where the parts run, and what carries the weights between them."""

    kind: Literal["local", "inline"] = "local"  # processes on this machine, or everything in one process
    engines: int = Field(1, ge=1)
    engine_threads: int = Field(1, ge=1)  # of each engine
    trainer_threads: int = Field(1, ge=1)
    sync: SyncSettings = SyncSettings()


class RolloutSettings(Config):
    """What is sampled for each step."""

    groups: int = Field(16, ge=1)  # groups (tasks) a step
    group_size: int = Field(8, ge=1)  # samples of each task
    max_tokens: int = Field(256, ge=1)  # of one reply
    temperature: float = Field(1.0, ge=MIN_TEMPERATURE)  # greedy tokens have no logprob to train on
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    min_p: float = Field(0.0, ge=0, lt=1)
    window: int = Field(1, ge=1)  # look-ahead past the oldest unfinished group, see `buffer`
    episode_s: float = Field(600.0, gt=0)  # an episode that takes longer ends as an infrastructure error


class WarmupSettings(Config):
    """Supervised training on the tasks' own answers before reinforcement learning. Off while `accuracy` is 0."""

    accuracy: float = Field(0.0, ge=0, le=1)  # train until greedy accuracy on training tasks reaches this,
    seconds: float = Field(55.0, gt=0)  # at most so long
    lr: float = Field(1e-3, gt=0)
    batch: int = Field(64, ge=1)  # rows a step


class EvalSettings(Config):
    """Greedy evaluation on held-out tasks, each time on one version."""

    every: int = Field(20, ge=0)  # steps; 0: only before and after
    tasks: int = Field(128, ge=1)  # while training
    final_tasks: int = Field(1024, ge=1)  # before the first and after the last step


class RecordSettings(LogSettings):
    """What is kept of a run, besides the ledger and the metrics, which always are."""

    checkpoint_every: int = Field(50, ge=0)  # steps; 0: only at the end
    checkpoints: int = Field(2, ge=1)  # how many are kept
    probe_every: int = Field(5, ge=0)  # steps between matched-version logprob probes; 0: never


SHORT: dict[str, Callable[[str], Any]] = {
    "env": parse_env,
    "algorithm": lambda name: {"name": name},
    "placement": lambda kind: {"kind": kind},
}
"""Keys that may be a short string, and the tables these stand for."""


class RunConfig(Config):
    run_dir: Path
    model: str  # a Hugging Face folder, or "new:SIZE" for a random one made here
    env: EnvSettings
    algorithm: AlgorithmSettings = AlgorithmSettings.preset("grpo")
    steps: int = Field(100, ge=1)
    max_lag: int = Field(1, ge=0)
    seed: int = Field(0, ge=0)
    placement: PlacementSettings = PlacementSettings()
    rollout: RolloutSettings = RolloutSettings()
    engine: EngineSettings = EngineSettings()
    trainer: TrainerSettings = TrainerSettings()
    scoring: ScoringSettings = ScoringSettings()
    warmup: WarmupSettings = WarmupSettings()
    eval: EvalSettings = EvalSettings()
    record: RecordSettings = RecordSettings()

    @classmethod
    def expanded(cls, tree: dict[str, Any]) -> dict[str, Any]:
        return {key: SHORT[key](value) if key in SHORT and isinstance(value, str) else value for key, value in tree.items()}

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, given: Any) -> Any:
        return cls.expanded(given) if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        self.algorithm.check(self.rollout.group_size)
        widest = self.max_lag * self.rollout.groups + 1
        if self.rollout.window > widest:
            raise ValueError(
                f"rollout.window = {self.rollout.window}: at most max_lag * rollout.groups + 1 = {widest} keeps the bound"
            )
        return self


MAY_CHANGE = frozenset({"run_dir", "steps", "placement", "eval", "record", "scoring"})
"""Keys that may differ when a run goes on. Any other one would change what the recorded part of the run means."""


def load_recipe(files: Sequence[str | Path], overrides: Iterable[str] = (), base: dict[str, Any] | None = None) -> RunConfig:
    """`base`, then the files, then the overrides; later wins. Unless one says otherwise, run_dir is runs/FILE."""
    named = {"run_dir": f"runs/{Path(files[0]).stem}"} if files else {}
    return load(RunConfig, files, overrides, named | (base or {}))


def check_same_run(old: dict[str, Any], new: dict[str, Any], folder: Path) -> None:
    """Refuse to go on with a run under a recipe that is not its own."""
    changed = sorted(k for k in old.keys() | new.keys() if old.get(k) != new.get(k) and k not in MAY_CHANGE)
    if changed:
        raise ConfigError(
            f"{folder} holds a run of another recipe: {', '.join(changed)} differ. Use another run_dir, or change only "
            f"{', '.join(sorted(MAY_CHANGE - {'run_dir'}))}"
        )
