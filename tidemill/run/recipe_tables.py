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

    groups: int = Field(default=16, ge=1)  # groups a step; a group is all samples of one task
    group_size: int = Field(default=8, ge=1)  # samples of each task
    max_tokens: int = Field(default=256, ge=1)  # tokens of one reply, at most
    # sampling temperature; not 0, because greedy tokens have no logprob to train on
    temperature: float = Field(default=1.0, ge=MIN_TEMPERATURE)
    top_p: float = Field(default=1.0, gt=0, le=1)  # sample from the likeliest tokens of this total probability; 1: all
    top_k: int = Field(default=0, ge=0)  # sample from this many likeliest tokens; 0: all
    min_p: float = Field(default=0.0, ge=0, lt=1)  # least probability, as a share of the likeliest token's; 0: off
    # ids, from the oldest waiting group on, of which a step takes the finished ones; 1: in order
    window: int = Field(default=1, ge=1)
    episode_s: float = Field(default=600.0, gt=0)  # seconds after which an episode ends as an infrastructure error


class ReplaySettings(Config):
    """Replay of groups from earlier steps beside a step's own. Off while `share` is 0."""

    share: float = Field(default=0.0, ge=0, le=4)  # replayed groups, as a share of the step's own groups; 0: none
    within: int = Field(default=16, ge=1)  # steps that a replayed group may lie back; max_lag does not apply
    times: int = Field(default=1, ge=1)  # times that a group is replayed, at most


class DataSettings(Config):
    """Order of the training tasks, and replay."""

    order: Order = "shuffled"  # order of tasks; frontier, easy_first and mixed go by each task's pass rate so far
    retire: float = Field(default=0.0, ge=0, le=1)  # a task is given no more once its group's pass rate reaches this; 0: off
    replay: ReplaySettings = ReplaySettings()


class WarmupSettings(Config):
    """Supervised training on the tasks' own answers before RL. Off while `accuracy` is 0."""

    # greedy accuracy on training tasks at which the warm-up ends; 0: no warm-up
    accuracy: float = Field(default=0.0, ge=0, le=1)
    steps: int = Field(default=5000, ge=1)  # steps after which the run ends with an error if accuracy was not reached
    lr: float = Field(default=1e-3, gt=0)  # learning rate of the warm-up
    batch: int = Field(default=64, ge=1)  # rows (a task's prompt and answer) a step

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

    every: int = Field(default=20, ge=0)  # steps between evaluations; 0: only before the first step and after the last
    tasks: int = Field(default=128, ge=1)  # held-out tasks of an evaluation while training
    # held-out tasks of the evaluations before the first step and after the last
    final_tasks: int = Field(default=1024, ge=1)


class RecordSettings(LogSettings):
    """Records of a run besides the ledger and the metrics, which are always kept."""

    checkpoint_every: int = Field(default=50, ge=0)  # steps between checkpoints; 0: only at the end
    # checkpoints that are kept; a resume falls back on an older one if the newest is damaged
    checkpoints: int = Field(default=2, ge=1)
    keep_every: int = Field(default=0, ge=0)  # steps between checkpoints that are kept for good; 0: none are
    probe_every: int = Field(default=5, ge=0)  # steps between matched-version logprob probes; 0: never


class SuperviseSettings(Config):
    """Supervision of processes, and restarts when one ends."""

    resume: bool = False  # resume the run by itself when the trainer has ended
    # restarts of one engine, or resumes of the run, within window_s; then the run stops
    restarts: int = Field(default=5, ge=0)
    window_s: float = Field(default=600.0, gt=0)  # seconds within which restarts are counted
    backoff_s: float = Field(default=1.0, ge=0)  # seconds before restarting what did not last; doubled each time
    heartbeat_s: float = Field(default=1.0, gt=0)  # seconds between two heartbeats
    # seconds without an answer before a process is killed; more than an engine step takes
    silent_s: float = Field(default=60.0, gt=0)
    stuck_s: float = Field(default=900.0, gt=0)  # seconds in a call without progress before a process is killed
