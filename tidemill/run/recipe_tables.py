"""Settings tables of a run: rollouts, data, warm-up, evaluation and more."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from tidemill.core.config import Config
from tidemill.core.types import MIN_TEMPERATURE
from tidemill.envs.curriculum import Order
from tidemill.observability.observability_settings import LogSettings


class RolloutSettings(Config):
    """Sampling of each step's groups."""

    groups: int = Field(default=16, ge=1, description="Groups in a step. A group holds all samples of one task")
    group_size: int = Field(default=8, ge=1, description="Samples of each task")
    max_tokens: int = Field(default=256, ge=1, description="Most tokens of one reply")
    temperature: float = Field(
        default=1.0,
        ge=MIN_TEMPERATURE,
        description="Sampling temperature. It cannot be 0, because greedy tokens have no logprob to train on",
    )
    top_p: float = Field(default=1.0, gt=0, le=1, description="Total probability of the tokens sampled from. 1: all")
    top_k: int = Field(default=0, ge=0, description="Number of tokens sampled from, the likeliest. 0: all")
    min_p: float = Field(
        default=0.0, ge=0, lt=1, description="Least probability, as a share of the likeliest token's. 0: off"
    )
    window: int = Field(
        default=1,
        ge=1,
        description="Groups, from the oldest waiting one on, of which a step takes those that have finished. 1: in order",
    )
    episode_s: float = Field(default=600.0, gt=0, description="Seconds before an episode ends as an infrastructure error")


class ReplaySettings(Config):
    """Replay of groups from earlier steps beside a step's own. Off while `share` is 0."""

    share: float = Field(default=0.0, ge=0, le=4, description="Replayed groups, as a share of the step's own. 0: none")
    within: int = Field(default=16, ge=1, description="Most steps that a replayed group lies back, whatever max_lag is")
    times: int = Field(default=1, ge=1, description="Most times that a group is replayed")

    @model_validator(mode="after")
    def _replaying(self) -> ReplaySettings:
        if not self.share and self.model_dump(exclude_defaults=True):
            raise ValueError("within and times apply to what is replayed: set data.replay.share, 0.25 say")
        return self


class DataSettings(Config):
    """Order of the training tasks, and replay."""

    order: Order = Field(
        default="shuffled", description="Order of tasks. frontier, easy_first and mixed go by each task's pass rate so far"
    )
    retire: float = Field(default=0.0, ge=0, le=1, description="Pass rate from which on a task is not given again. 0: off")
    replay: ReplaySettings = ReplaySettings()

    @model_validator(mode="after")
    def _goes_on(self) -> DataSettings:
        if self.order == "easy_first" and not self.retire:
            raise ValueError(
                "order = 'easy_first' would give what is solved for ever: set data.retire, to 0.9 for example, to go on"
            )
        return self


class WarmupSettings(Config):
    """Supervised training on the tasks' own answers before RL. Off while `accuracy` is 0."""

    accuracy: float = Field(
        default=0.0, ge=0, le=1, description="Greedy accuracy on training tasks at which the warm-up ends. 0: no warm-up"
    )
    steps: int = Field(default=5000, ge=1, description="Most steps. If accuracy is not reached, the run ends with an error")
    lr: float = Field(default=1e-3, gt=0, description="Learning rate of the warm-up")
    batch: int = Field(default=64, ge=1, description="Rows in a step of the warm-up. A row is a task's prompt and answer")

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
    """Greedy evaluation on held-out tasks, each time of one version."""

    every: int = Field(default=20, ge=0, description="Steps between evaluations. 0: only before and after training")
    tasks: int = Field(default=128, ge=1, description="Held-out tasks of the evaluations during training")
    final_tasks: int = Field(default=1024, ge=1, description="Held-out tasks of the evaluations before and after training")


class RecordSettings(LogSettings):
    """Records of a run besides the ledger and the metrics, which are always kept."""

    checkpoint_every: int = Field(default=50, ge=0, description="Steps between checkpoints. 0: only at the end")
    checkpoints: int = Field(default=2, ge=1, description="Checkpoints that are kept, in case the newest is damaged")
    keep_every: int = Field(default=0, ge=0, description="Steps between checkpoints that are kept for good. 0: none are")
    probe_every: int = Field(default=5, ge=0, description="Steps between probes of one version's logprobs. 0: never")


class SuperviseSettings(Config):
    """Supervision of processes, and restarts when one ends."""

    resume: bool = Field(default=False, description="Start a lost trainer again by itself, while engines go on")
    restarts: int = Field(default=5, ge=0, description="Most restarts of one engine, or resumes, within window_s")
    window_s: float = Field(default=600.0, gt=0, description="Seconds within which restarts are counted")
    backoff_s: float = Field(default=1.0, ge=0, description="Seconds before a restart, doubled after each that did not last")
    heartbeat_s: float = Field(default=1.0, gt=0, description="Seconds between two heartbeats")
    silent_s: float = Field(
        default=60.0,
        gt=0,
        description="Seconds without an answer before a process is killed. An engine step must be shorter",
    )
    stuck_s: float = Field(default=900.0, gt=0, description="Seconds in a call without progress before a process is killed")
