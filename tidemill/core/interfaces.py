"""Interfaces between the controller and the rest: engine, trainer, environment, ledger.

Every argument and result is one of our nouns or plain data, so that any of these can live in another process:
a proxy encodes the arguments with `serialization`, and the annotations here are what the other side decodes them by.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from tidemill.core.chat_interface import Chat
from tidemill.core.token_extras import TokenExtra
from tidemill.core.types import (
    Array,
    Completion,
    GenerateRequest,
    Group,
    LossSpec,
    Metrics,
    Outcome,
    PreparedStep,
    Sample,
    Scored,
    Task,
    Telemetry,
    TrainResult,
    Trajectory,
    Unscorable,
    Version,
)
from tidemill.core.weight_update import UpdateSupport, WeightUpdate


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The features that an engine offers. `run.capability_check` holds them against the recipe."""

    context: int  # tokens a sequence may hold, prompt included
    token_versions: bool = True  # each token carries the version that sampled it
    support: bool = True  # under top-p, top-k and min-p, a completion tells the tokens that each one was chosen from
    seeds: bool = True  # a seed repeats its tokens
    samples_at: float | None = None  # the only temperature above 0 at which logprobs are those that it sampled by; None: any
    score: bool = True  # `score` works
    scores_at: float | None = None  # the only temperature that it works at; None: any
    extras: tuple[TokenExtra, ...] = ()  # returned where a request names them; with MODEL_LOGPROBS: alternatives, too
    constraint: bool = False  # a reply can be held to a grammar: `GenerateRequest.constraint`
    sleep: bool = False  # `sleep` and `wake` work
    policies: bool = False  # it can serve several policies side by side
    proof: Literal["served", "received", "none"] = "served"  # what the fingerprint of `update` was computed over
    updates: UpdateSupport = field(default_factory=UpdateSupport)  # of the transport, too, that it was built with
    receivers: int = 1  # processes that receive a live update: one for each tensor-parallel rank

    def scores(self, temperature: float) -> bool:
        """True if `score` works at this temperature."""
        return self.score and self.scores_at in (None, temperature)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """An engine's load and progress at this moment."""

    waiting: int
    running: int
    version: Version
    kv_used: float  # share of KV pages in use, 0..1
    generated: int  # tokens sampled since the start
    preemptions: int
    prompt_tokens: int
    cached_tokens: int
    drafted_tokens: int = 0  # guesses of speculation
    accepted_tokens: int = 0  # guesses that came true


class Sampler(Protocol):
    """The part of an engine that episodes and scores ask; an engine pool has it, too."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one continuation. Raises ValueError if it does not fit or cannot be done here."""
        ...

    async def score(self, tokens: Array, policy: str, temperature: float, top_k: int) -> Scored:
        """Stamped logprobs of given tokens [T] at `temperature` (1.0: the unmodified model)."""
        ...

    async def abort(self, key: str) -> None:
        """End every request of this key; each returns what it has, with Finish.CANCELLED."""
        ...


@runtime_checkable
class Engine(Sampler, Protocol):
    async def capabilities(self) -> Capabilities: ...

    async def update(self, update: WeightUpdate) -> Version:
        """Stage, verify and commit new weights between two decode steps; return the version now served.

        That version carries the fingerprint of the weights received. Raises PolicyMismatch when they are not those that
        were sent, BaseMissing when they apply to others than those that are served, TransferFailed when they did not arrive,
        and ValueError for a kind of update, or a number of parts, that this engine does not take. The engine then goes on
        serving the old version.
        """
        ...

    async def sleep(self, weights: bool = False) -> None:
        """Give the KV memory back, and with `weights` that of the weights, until `wake`.

        An update under way is waited for, and with in_flight = "finish" all sequences in flight, too. Otherwise these are
        kept, and prefilled again after `wake`. Calls that come meanwhile wait for `wake`; updates are taken at once. What
        the prefix cache held is lost. Raises ValueError, and gives nothing back, when no update could bring weights again.
        """
        ...

    async def wake(self) -> None:
        """Take the memory again and go on. Does nothing in an engine that is awake.

        Without an update since its weights were given back, it reads the last one again. It raises PolicyMismatch, and
        sleeps on, if there was none or that is gone: it then needs one first.
        """
        ...

    async def stats(self) -> EngineStats: ...
    async def telemetry(self) -> Telemetry: ...
    async def close(self) -> None: ...


@runtime_checkable
class Trainer(Protocol):
    async def forward(self, samples: list[Sample], policy: str = "policy") -> list[Array]:
        """[T] float32 logprobs of each sample, at its temperature, by "policy" (its own, `Sample.policy`) or "reference"."""
        ...

    async def forward_backward(self, samples: list[Sample], losses: dict[str, LossSpec]) -> TrainResult:
        """Add the gradient of sum over tokens of weight * loss. Several calls may precede `apply`."""
        ...

    async def apply(self, scale: float) -> Metrics:
        """Scale the gradient by the whole step's `scale`, once; clip it, and take one optimizer step."""
        ...

    async def publish(self, version: Version, full: bool = False) -> WeightUpdate:
        """Write or announce the serving weights for engines to stage; the result's version carries their fingerprint.

        Those of a live update are sent by `send`, while engines receive. full: the version was published as a change, and an
        engine lacks the base: publish the same weights whole. Raises WeightsMoved if another version was published since.
        """
        ...

    async def send(self, update: WeightUpdate) -> str:
        """Send a live update that was published, as its rendezvous says, and once more to others if asked.

        Returns the reason why an engine did not receive everything, "" if all did. Weights do not change meanwhile. Raises
        WeightsMoved when they have changed since the publication, or another version has been published.
        """
        ...

    async def snapshot(self) -> None:
        """Copy what a resume needs. A call that would change weights or optimizer waits for the copy."""
        ...

    async def save(self, folder: str) -> None:
        """Write the latest snapshot to `folder`, which is created, and free its memory.

        Other methods may be called meanwhile. Raises CheckpointError when it cannot be written.
        """
        ...

    async def load(self, folder: str) -> None:
        """Go on from what `save` wrote. Raises CheckpointError, and changes nothing, when it does not fit."""
        ...

    async def export(self, folder: str) -> None:
        """Write the weights, configuration and tokenizer as a Hugging Face folder."""
        ...

    async def sleep(self) -> None:
        """Move what only a gradient or an update needs from the device to the host, and give back what is free.

        It may publish, evaluate and export meanwhile. Does nothing in a trainer that sleeps.
        """
        ...

    async def wake(self) -> None:
        """Bring it back. Does nothing in a trainer that is awake."""
        ...

    async def telemetry(self) -> Telemetry: ...
    async def close(self) -> None: ...


@runtime_checkable
class Progressing(Protocol):
    def progress(self) -> float:
        """Work done so far, in any unit that only grows. It tells a slow process from a stuck one."""
        ...


@runtime_checkable
class Environment(Protocol):
    """Tasks, with a way to attempt and judge them. When `run` returns None, `judge` decides on the group."""

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
    """Optional methods of an environment, by which its verdicts can be checked before training."""

    def gold(self, task: Task) -> Gold:
        """The reply that must earn the full score (several: one per turn), or why none is known."""
        ...

    @property
    def grouped(self) -> bool:
        """True if the verdict on an attempt may depend on the other attempts at its task."""
        ...


class Algorithm(Protocol):
    """Turns a step's groups into the samples, losses and updates that train on them."""

    def drop_reason(self, group: Group) -> str | None:
        """The reason why this group carries no gradient; None if it does."""
        ...

    def rows(self, groups: Sequence[Group], step: int) -> list[Sample]:
        """The rows trained at this step, as yet without advantages and weights."""
        ...

    @property
    def asks(self) -> Sequence[str]:
        """The policies whose logprobs `prepare` needs: "policy" (at the start of the step), "reference"."""
        ...

    @property
    def by_group(self) -> bool:
        """True if each group can be prepared alone with the same result, and the step is one update."""
        ...

    def prepare(
        self, groups: Sequence[Group], step: int, rows: Sequence[Sample], logprobs: Mapping[str, Sequence[Array]]
    ) -> PreparedStep: ...


class Roller(Protocol):
    """Rolls out and scores one group at a time for the controller."""

    async def rollout(self, group_id: int, task: Task) -> Group: ...


class Publisher(Protocol):
    """Carries a version from the trainer to every engine."""

    async def publish(self, version: Version) -> Version:
        """Returns, with its fingerprint, the version of its policy that every engine now serves."""
        ...

    def withdraw(self) -> list[Version]:
        """The trainer is lost, and what it published cannot be read any more: engines that start wait for the next versions.

        Returns the version of each policy that was published last, which some or all engines serve.
        """
        ...


class Ledger(Protocol):
    """The durable record of a run (I3). Each call is on disk when it returns."""

    def admit(self, group_id: int, task: Task) -> None: ...
    def finish(self, group: Group) -> None:
        """Record a group that was rolled out and scored, with its trajectories. It is still pending."""
        ...

    def drop(self, group_id: int, reason: str) -> None: ...
    def begin_step(self, step: int, incarnation: int, group_ids: Sequence[int], again: Sequence[int] = ()) -> None:
        """Record a step's groups before any weight changes. again: trained by earlier steps already."""
        ...

    def replay_step(self, step: int, incarnation: int) -> tuple[list[int], list[int]]:
        """Record that a step which was begun is trained again; returns its groups, and those it trains once more."""
        ...

    def end_step(self, step: int, incarnation: int, metrics: Metrics) -> None: ...
    def publish(self, version: Version) -> None: ...
    def evaluation(self, step: int, results: Metrics) -> None: ...
    def event(self, kind: str, detail: dict) -> None: ...


class Sink(Protocol):
    """Receives metrics. A sink that raises is reported once and switched off; the run goes on."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...
    def close(self) -> None: ...
