"""Data types that move through the system, from a task to a training sample.

    Task -> GenerateRequest -> Completion -> Trajectory -> Group -> Sample   (Batch is the trainer's own and never leaves it)

Token truth (I7): token ids travel, text is derived. Provenance (`mask`, `logprobs`, `versions`) is written when a token
is made and is never inferred from its value later; what a loss weighs is a separate array (`Sample.weights`).
Arrays are NumPy, one-dimensional and of the dtype their comment names. T is the length of the row in question."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec
import numpy as np

from tidemill.core.constraints import Constraint as Constraint
from tidemill.core.policy_version import Version as Version
from tidemill.core.sampling_support import Support as Support
from tidemill.core.token_extras import TokenExtras

Array = np.ndarray


class Finish(StrEnum):
    """The reason why a completion or an episode ended."""

    STOP = "stop"  # a stop id was sampled
    LENGTH = "length"  # max_tokens was reached
    CONTEXT = "context"  # the model's context is full
    ENV_DONE = "env_done"  # the environment ended the episode
    ENV_ERROR = "env_error"  # the environment raised
    CANCELLED = "cancelled"  # aborted; nothing is trained on it
    GIVEN = "given"  # nothing was sampled: the task holds the reply


TRUNCATED = frozenset({Finish.LENGTH, Finish.CONTEXT})
CUT_AT, OWN_LIMIT = "cut_at", "own_limit"  # in `Trajectory.info`: tokens that the last reply, cut off, might have, and whose
UNANSWERED = "unanswered"  # in `Trajectory.info`: replies that were asked for and did not come, if there are any
GREEDY = -1  # the sample number of an attempt without noise, which others are compared with


class InFlight(StrEnum):
    """Treatment of sequences in flight when new weights arrive; it decides what their logprobs mean."""

    FINISH = "finish"  # drain: they finish under the weights they began with, then the commit happens
    KEEP = "keep"  # go on at once, on the KV the old weights wrote: the fastest, the KV is then of mixed versions
    RECOMPUTE = "recompute"  # prefill them again under the new weights, then go on


MIN_TEMPERATURE = 1e-3  # logits divided by less overflow float32
MIN_REPETITION = 0.01  # of `repetition_penalty`, whose inverse is the most: logits stay finite
MOST_TOP_LOGPROBS = 20  # alternatives that may be asked for


@dataclass(frozen=True, slots=True)
class SamplingParams:
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    max_tokens: int = 256
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False  # stop only at max_tokens or the context's end
    seed: int = 0  # 64 bits; see `derive_seed`
    top_logprobs: int = 0  # alternatives reported per token, of the unmodified model distribution
    last: bool = False  # no prompt will go on where this ends: its KV beyond the prompt is not kept for one
    min_tokens: int = 0  # no stop id is sampled before so many tokens
    presence_penalty: float = 0.0  # taken once from the logit of each token of the reply so far
    frequency_penalty: float = 0.0  # taken as often as the token stands in the reply so far
    repetition_penalty: float = 1.0  # divides the positive logits of tokens of prompt and reply, multiplies the negative
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)

    @property
    def adjusted(self) -> bool:
        """True if sampling changes the model's logits: by penalties, a bias or `min_tokens`."""
        penalised = self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1
        return penalised or self.min_tokens > 0 or bool(self.logit_bias)

    def __post_init__(self) -> None:
        t = self.temperature
        checks = {
            "temperature": (t == 0 or t >= MIN_TEMPERATURE, f"0 (greedy) or >= {MIN_TEMPERATURE}"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "top_k": (self.top_k >= 0, ">= 0 (0 is off)"),
            "min_p": (0 <= self.min_p < 1, "in [0, 1)"),
            "max_tokens": (self.max_tokens >= 1, ">= 1"),
            "top_logprobs": (0 <= self.top_logprobs <= MOST_TOP_LOGPROBS, f"in 0..{MOST_TOP_LOGPROBS}"),
            "min_tokens": (self.min_tokens >= 0, ">= 0"),
            "presence_penalty": (-2 <= self.presence_penalty <= 2, "in [-2, 2]"),
            "frequency_penalty": (-2 <= self.frequency_penalty <= 2, "in [-2, 2]"),
            "repetition_penalty": (
                MIN_REPETITION <= self.repetition_penalty <= 1 / MIN_REPETITION,
                f"in [{MIN_REPETITION}, {1 / MIN_REPETITION:g}]",
            ),
            "logit_bias": (all(-100 <= bias <= 100 for _, bias in self.logit_bias), "in [-100, 100] for each token"),
        }
        for name, (ok, expected) in checks.items():
            if not ok:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected a value {expected}")


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One continuation to sample."""

    tokens: Array  # [P] int32: the prompt
    params: SamplingParams
    policy: str = "policy"  # whose weights sample it
    key: str = ""  # the episode: requests of one key share their prefix cache and are aborted together
    constraint: Constraint | None = None  # what the reply must be; an engine without that capability refuses it
    extras: tuple[str, ...] = ()  # names of the token extras to return; an engine refuses one that it does not declare


@dataclass(slots=True)
class Completion:
    """One model call: the tokens it sampled. n is their number (a sampled stop id is among them)."""

    tokens: Array  # [n] int32
    logprobs: Array  # [n] float32  of the distribution that was sampled (temperature, truncation applied), nats
    versions: Array  # [n] int32  step of the weights that sampled each token
    sources: tuple[Version, ...]  # the distinct versions behind `versions`, oldest first
    finish: Finish
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens served from the prefix cache
    support: Support | None = None  # None where every token was sampled from the whole vocabulary
    top_ids: Array | None = None  # [n, k] int32, when top_logprobs = k > 0
    top_logprobs: Array | None = None  # [n, k] float32
    queued_s: float = 0.0  # from arrival to the first scheduled step
    first_token_s: float = 0.0  # from arrival to the first sampled token
    engine: str = ""
    extras: TokenExtras = field(default_factory=dict)  # [n, *shape] each, those that were asked for: see `token_extras`


@dataclass(slots=True)
class Scored:
    """Logprobs of given tokens: position t holds log p(tokens[t] | tokens[:t]); position 0 holds 0."""

    logprobs: Array  # [T] float32
    version: Version
    top_ids: Array | None = None  # [T, k] int32
    top_logprobs: Array | None = None  # [T, k] float32


class Score(msgspec.Struct, frozen=True, tag=True):
    """The score of a judged attempt; the only outcome that is trained on."""

    value: float
    parts: dict[str, float] = {}  # named components, for metrics and multi-reward advantages
    turns: tuple[float, ...] = ()  # rewards of single turns besides, from the first on, for advantages that tell turns apart
    seats: tuple[float, ...] = ()  # rewards of single seats besides, from seat 0 on, for advantages that tell seats apart

    def __post_init__(self) -> None:
        if not np.isfinite(self.value):
            raise ValueError(f"Score(value={self.value!r}): expected a finite number; return Unscorable(reason) instead")
        for name in ("turns", "seats"):
            values: Any = getattr(self, name)
            if hasattr(values, "tolist"):  # an array, or a torch tensor
                values = tuple(np.atleast_1d(values.tolist()).tolist())
                msgspec.structs.force_setattr(self, name, values)
            if values and not np.isfinite(values).all():
                raise ValueError(f"Score({name}={values!r}): expected finite numbers")


class Unscorable(msgspec.Struct, frozen=True, tag=True):
    """The attempt cannot be judged (no gold answer, a malformed task). Not a zero, not trained on."""

    reason: str


class InfraError(msgspec.Struct, frozen=True, tag=True):
    """Judging failed for a cause outside the policy (crash, time-out, dead sandbox). Never a score (I5)."""

    reason: str


Outcome = Score | Unscorable | InfraError


@dataclass(slots=True)
class Task:
    """A task to attempt. `id` is stable across runs; `data` holds plain JSON values, such as the answer."""

    id: str
    prompt: Any  # str, or a list of {"role", "content"} messages
    data: dict[str, Any] = field(default_factory=dict)
    env: str = ""


@dataclass(frozen=True, slots=True)
class Said:
    """One message of a conversation, as people read it."""

    role: str
    text: str
    policy: bool = False  # the policy wrote it; else the environment sent it


@dataclass(slots=True)
class Trajectory:
    """One row of an attempt: a conversation or a branch of one, in tokens. Most attempts have a single row."""

    tokens: Array  # [T] int32    everything the model saw, in order
    mask: Array  # [T] bool     the policy sampled this token
    logprobs: Array  # [T] float32  behaviour logprob (nats); 0 where not mask
    versions: Array  # [T] int32    step of the weights that sampled it; -1 where not mask
    finish: Finish
    outcome: Outcome | None = None  # the attempt's, on its last row only; None until it was scored
    sources: tuple[Version, ...] = ()  # the distinct versions behind `versions`, oldest first
    sample: int = 0  # number of the attempt whose row this is; GREEDY: the noise-free attempt the others are compared with
    seat: int = 0  # who speaks in it, where an attempt has several agents
    turns: int = 1
    temperature: float = 1.0  # what `logprobs` were taken at
    text: str = ""  # the last reply, decoded: derived, for rewards and people
    support: Support | None = None  # rows align with the masked positions, in order
    parent: tuple[int, int] | None = None  # forked from this row of its attempt at this position: what is before is context
    info: dict[str, float] = field(default_factory=dict)  # timings and counts: queued_s, reward_s, cached_tokens, ...
    given: Array | None = None  # [T] bool    nobody sampled this token, and it is to be learnt; None: there is none such
    said: tuple[Said, ...] = ()  # the conversation, message by message: derived, for people
    extras: TokenExtras = field(default_factory=dict)  # [T, *shape] each: see `token_extras`

    @property
    def learnt(self) -> Array:
        """[T] bool: the tokens that may be trained on, sampled or given."""
        return self.mask if self.given is None else self.mask | self.given

    @property
    def sampled(self) -> int:
        return int(self.mask.sum())

    @property
    def replies(self) -> int:
        """The stretches of sampled tokens: the turns that a score may reward."""
        return int((np.diff(self.mask.astype(np.int8), prepend=0) > 0).sum())

    @property
    def oldest(self) -> int:
        """The step of its oldest sampled token, the one that counts for `max_lag`."""
        return int(self.versions[self.mask].min())

    @property
    def policy(self) -> str:
        """The policy that sampled it."""
        return self.sources[0].policy if self.sources else "policy"

    @property
    def newest(self) -> int:
        return int(self.versions[self.mask].max())

    @property
    def reward(self) -> float:
        """The score's value; NaN when the outcome is not a score, so that no sum can swallow it."""
        return self.outcome.value if isinstance(self.outcome, Score) else float("nan")


@dataclass(slots=True)
class Group:
    """The attempts at one task: the unit of admission, staleness and group-relative advantages.

    An attempt is the rows with one `sample`, in order. Its last row holds its outcome, finish and text.
    """

    id: int  # the admission id; the ledger's key
    task: Task
    trajectories: list[Trajectory] = field(default_factory=list)

    @property
    def oldest(self) -> int | None:
        """The step of its oldest sampled token of any policy; None where nothing was sampled, so that it has no age."""
        return min((t.oldest for t in self.trajectories if t.mask.any()), default=None)

    @property
    def attempts(self) -> list[list[Trajectory]]:
        """The rows of each attempt."""
        rows = dict[int, list[Trajectory]]()
        for t in self.trajectories:
            rows.setdefault(t.sample, []).append(t)
        return list(rows.values())

    @property
    def ends(self) -> list[Trajectory]:
        """The last row of each attempt, in the order of `attempts`: it holds the outcome, the finish and the text."""
        return list({t.sample: t for t in self.trajectories}.values())

    @property
    def sources(self) -> set[Version]:
        """The versions that sampled its tokens."""
        return {source for trajectory in self.trajectories for source in trajectory.sources}

    @property
    def rewards(self) -> Array:
        """[n] float64, one for each attempt; NaN where there is no score."""
        return np.array([t.reward for t in self.ends], np.float64)


@dataclass(frozen=True, slots=True)
class LossSpec:
    """A loss by name with its constants: either a name in `algorithms.losses` or `FILE.py:function`."""

    name: str
    params: dict[str, float] = field(default_factory=dict)
    also: tuple[LossSpec, ...] = ()  # further terms on the same tokens, each times its `weight`
    weight: float = 1.0  # of all of it, what stands in `also` included


@dataclass(slots=True)
class Sample:
    """A row to train on. `weights` scale each token's loss; `mask` marks what the policy sampled."""

    tokens: Array  # [T] int32
    mask: Array  # [T] bool     sampled by the policy
    logprobs: Array  # [T] float32  behaviour logprob; 0 where not mask
    versions: Array  # [T] int32    -1 where not mask
    advantages: Array  # [T] float32  0 where not trained
    weights: Array  # [T] float32  the reduction's factor of each token in the loss; 0 is not trained
    policy: str = "policy"  # that it trains
    loss: str = "policy"  # key into the losses given with the call
    temperature: float = 1.0
    old_logprobs: Array | None = None  # [T] float32  trainer-side logprob at the start of the step, when recomputed
    ref_logprobs: Array | None = None  # [T] float32  reference policy
    values: Array | None = None  # [T] float32  a critic's value before each token, at the start of the step
    returns: Array | None = None  # [T] float32  what the critic is trained towards
    lags: Array | None = None  # [T] int32  updates since the weights that sampled it, if the loss reads that; else 0
    support: Support | None = None  # rows align with the masked positions: logprobs are of the distribution over these ids
    group: int = -1
    attempt: int = 0  # its number, see `Trajectory.sample`
    extras: TokenExtras = field(default_factory=dict)  # [T, *shape] each: see `token_extras`

    @property
    def predicted(self) -> Array:
        """[T] bool: the tokens whose logprobs a forward pass returns: sampled, or with a weight."""
        return self.mask | (self.weights != 0)


Metrics = dict[str, float]


@dataclass(slots=True)
class TrainResult:
    """Result of `forward_backward`: unnormalised sums, and one array of logprobs per sample."""

    metrics: Metrics  # sums over trained tokens; "tokens" is their count
    logprobs: list[Array]  # each [T] float32, at the sample's temperature; 0 at position 0
    drops: bool = False  # the passes dropped inputs at random, so that logprobs are not the served policy's


@dataclass(slots=True)
class Span:
    """A stretch of time in one process, in seconds of the machine-wide monotonic clock."""

    name: str
    start: float
    end: float
    args: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Telemetry:
    """The spans and counters that a process recorded since it was last asked."""

    process: str
    pid: int
    spans: list[Span]
    counters: dict[str, float]  # monotonically growing totals
    memory_bytes: int = 0  # peak so far: proportional set size where the system tells it, else resident


@dataclass(frozen=True, slots=True)
class Update:
    """One update of the optimizer: its samples, and the one scale of their gradient (I6)."""

    samples: list[Sample]
    scale: float  # for `Trainer.apply`


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A step's samples, their losses, and the updates that are made with them."""

    samples: list[Sample]
    losses: dict[str, LossSpec]
    updates: list[Update]  # one, unless the step is cut into minibatches or gone over several times
    metrics: Metrics
