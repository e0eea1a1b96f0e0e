"""The verbs: what the controller and the rollouts know of the rest. Placement decides what stands behind them.

Every argument and result is one of our nouns or plain data, so that any of these can live in another process:
a proxy encodes the arguments with `serialization`, and the annotations here are what the other side decodes them by.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from tidemill.core.types import (
    Array,
    Completion,
    Group,
    LossSpec,
    Metrics,
    Outcome,
    PreparedStep,
    Published,
    Sample,
    SamplingParams,
    Scored,
    Task,
    Telemetry,
    TrainResult,
    Trajectory,
    Unscorable,
    Version,
)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can promise. An unknown version boundary counts as the oldest possible version."""

    context: int  # tokens a sequence may hold, prompt included
    token_versions: bool = True
    support: bool = True
    score: bool = True
    sleep: bool = False
    adapters: bool = False


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Where an engine stands now."""

    waiting: int
    running: int
    version: Version
    kv_used: float  # share of KV pages in use, 0..1
    generated: int  # tokens sampled since the start
    preemptions: int
    prompt_tokens: int
    cached_tokens: int


@runtime_checkable
class Engine(Protocol):
    async def capabilities(self) -> Capabilities: ...

    async def generate(self, tokens: Array, params: SamplingParams, policy: str, key: str) -> Completion:
        """Sample a continuation of `tokens` [P] int32. `key` names the episode: sticky prefix salt, and abort.

        Raises ValueError when the prompt does not fit the context.
        """
        ...

    async def score(self, tokens: Array, policy: str, temperature: float, top_k: int) -> Scored:
        """Stamped logprobs of given tokens [T] at `temperature` (1.0: the unmodified model)."""
        ...

    async def update(self, published: Published) -> Version:
        """Stage, verify, commit between two decode steps. Returns the version now served, with the fingerprint of
        what was received. Raises PolicyMismatch, and goes on serving the old version, when that is not what was sent."""
        ...

    async def abort(self, key: str) -> None:
        """End every request of this key; each returns what it has, with Finish.CANCELLED."""
        ...

    async def sleep(self) -> None: ...
    async def wake(self) -> None: ...
    async def stats(self) -> EngineStats: ...
    async def telemetry(self) -> Telemetry: ...
    async def close(self) -> None: ...


@runtime_checkable
class Trainer(Protocol):
    async def forward(self, samples: list[Sample], policy: str = "policy") -> list[Array]:
        """Logprobs under the present weights, or those of the "reference", one [T] float32 array a sample, at the sample's
        temperature. No gradient."""
        ...

    async def forward_backward(self, samples: list[Sample], losses: dict[str, LossSpec]) -> TrainResult:
        """Accumulate the gradient of sum over tokens of weight * loss. May be called several times before `apply`."""
        ...

    async def apply(self, scale: float) -> Metrics:
        """Multiply the accumulated gradient by `scale` (once, for the whole step), clip, take one optimizer step."""
        ...

    async def publish(self, version: Version) -> Published:
        """Write the serving weights for engines to stage; the result's version carries their fingerprint."""
        ...

    async def snapshot(self) -> None:
        """Copy all that a resume needs of the trainer: weights, optimizer, schedule, RNG. The next step may run at once;
        what would change any of it waits for the copy."""
        ...

    async def save(self, folder: str) -> None:
        """Write the latest snapshot, and give its memory back. `folder` is created. Every other method may be called
        meanwhile, and changes nothing of what is written. Raises CheckpointError when it cannot be written."""
        ...

    async def load(self, folder: str) -> None:
        """Go on from what `save` wrote. Raises CheckpointError when it does not fit, and is then as it was before."""
        ...

    async def export(self, folder: str) -> None:
        """The weights, configuration and tokenizer as a Hugging Face folder."""
        ...

    async def telemetry(self) -> Telemetry: ...
    async def close(self) -> None: ...


class PolicyMismatch(RuntimeError):
    """Weights that are not the ones they claim to be (I1)."""


class TrainingDiverged(ArithmeticError):
    """The gradient is not finite. No step was taken; the weights are those of before."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written, or is not this trainer's. The message says what differs."""


class PeerLost(ConnectionError):
    """The process behind a proxy is gone; whatever it was doing is not done."""


class EngineFailed(RuntimeError):
    """An engine met an error of its own and has stopped; what it was doing is not done."""


@runtime_checkable
class Progressing(Protocol):
    def progress(self) -> float:
        """Work done so far, in any unit that only grows: it tells slow from stuck."""
        ...


class Chat(Protocol):
    """One seat's conversation with the policy. It owns template, tokens, logprobs, versions and masks."""

    async def reply(
        self, message: str | Sequence[Mapping[str, Any]], *, max_tokens: int | None = None, last: bool = False
    ) -> str:
        """Add `message` (a user turn, or several messages), sample the policy's answer and return its text.

        message: a text, or messages with `role`, `content` and whatever else the chat template reads. last: that no further
        one will be asked for, so that engines need not remember this one; one that is asked for all the same is only
        slower."""
        ...


@runtime_checkable
class Environment(Protocol):
    """Where tasks come from and how one is attempted. `run` returns None when `judge` decides on the whole group."""

    name: str

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of "train" or "eval": deterministic, indexable, disjoint."""
        ...

    async def run(self, task: Task, chat: Chat) -> Outcome | None: ...

    async def judge(self, task: Task, attempts: list[Trajectory]) -> list[Outcome]:
        """Outcomes of a group's attempts, in order. Called only for attempts that `run` left undecided."""
        ...

    async def close(self) -> None: ...


Gold = str | list[str] | Unscorable


@runtime_checkable
class Checkable(Protocol):
    """What an environment may say besides, so that its verdicts can be checked before anything is trained on them."""

    def gold(self, task: Task) -> Gold:
        """The reply that must earn the full score (several: one a turn), or why none is known."""
        ...

    @property
    def grouped(self) -> bool:
        """Whether the verdict on an attempt may depend on its siblings."""
        ...


class Algorithm(Protocol):
    """A step's groups to the samples, losses and updates that train on them."""

    def drop_reason(self, group: Group) -> str | None:
        """Why this group carries no gradient, or None."""
        ...

    def rows(self, groups: Sequence[Group], step: int) -> list[Sample]:
        """What is trained at this step, without advantages and weights yet."""
        ...

    @property
    def asks(self) -> Sequence[str]:
        """Whose logprobs of the rows `prepare` needs: the "policy"'s at the start of the step, the "reference"'s."""
        ...

    @property
    def by_group(self) -> bool:
        """Whether rows and samples of a group are the same alone and among the step's others, and the step is one update."""
        ...

    def prepare(
        self, groups: Sequence[Group], step: int, rows: Sequence[Sample], logprobs: Mapping[str, Sequence[Array]]
    ) -> PreparedStep: ...


class Roller(Protocol):
    """Rollout and scoring of one group: what the controller asks for."""

    async def rollout(self, group_id: int, task: Task) -> Group: ...


class Publisher(Protocol):
    """Carries a version from the trainer to every engine."""

    async def publish(self, version: Version) -> Version:
        """Returns, with its fingerprint, the version that every engine now serves."""
        ...


class Ledger(Protocol):
    """The durable record (I3). Each call is on disk when it returns; none takes longer than a disk write."""

    def admit(self, group_id: int, task: Task) -> None: ...
    def finish(self, group: Group) -> None:
        """The group was rolled out and scored: its trajectories are on disk. It is still pending."""
        ...

    def drop(self, group_id: int, reason: str) -> None: ...
    def begin_step(self, step: int, incarnation: int, group_ids: Sequence[int], again: Sequence[int] = ()) -> None:
        """The composition of a step, written before any weight changes: these groups are trained at this step, and those
        that an earlier step trained already are trained again."""
        ...

    def end_step(self, step: int, incarnation: int, metrics: Metrics) -> None: ...
    def publish(self, version: Version) -> None: ...
    def evaluation(self, step: int, results: Metrics) -> None: ...
    def event(self, kind: str, detail: dict) -> None: ...


class Sink(Protocol):
    """Receives metrics. A sink that raises is reported once and switched off; the run goes on."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...
    def close(self) -> None: ...
