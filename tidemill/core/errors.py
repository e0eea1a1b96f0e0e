"""Every exception that one package raises and another handles, with its meaning.

    TidemillError            a command reports it in one sentence, without a traceback, and ends with status 1
      ConfigError            the user can mend it: the sentence says what to do, and the status is 2
      RunFailed, LedgerError, ...      the world's faults: a process, a disk, a gradient, weights

Each class also has the built-in base that describes it (ValueError, OSError, TimeoutError), so that a caller may handle the
family. An exception that its own package handles is defined where it is raised. This module imports nothing, because every
process does it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tidemill.core.types import Finish


class TidemillError(Exception):
    """Base of all errors here. A command prints the message as one sentence."""


# --- what the user can mend ----------------------------------------------------------------------------------------------


class ConfigError(TidemillError, ValueError):
    """The configuration, or something it names, cannot be used. Any package raises it; only commands handle it."""


class UnsupportedModel(ConfigError):
    """The model cannot be computed exactly here. `models` raises it, naming what the model asks for."""


class RenamedKey(FutureWarning):
    """Warning: a recipe uses the old name of a key, which still works. The message names the new one."""


# --- a run and its folder ------------------------------------------------------------------------------------------------


class RunFailed(TidemillError, RuntimeError):
    """The run cannot go on. The controller raises it with the first cause and what to do; commands print it."""


class LedgerError(TidemillError, RuntimeError):
    """The record cannot be written or read, or a request contradicts it. Nothing was changed."""


class PayloadLost(LedgerError):
    """A recorded trajectory is gone, cut short or damaged, for good. Readers skip it or resume before it."""


class RunFolderError(LedgerError, ConfigError):
    """The run folder is not usable as it is: no ledger, another program's lock, a newer format."""


class RunFolderGone(LedgerError):
    """The run folder was renamed or deleted during the run."""


class CheckpointError(TidemillError, ValueError):
    """A checkpoint cannot be read or written, or is another trainer's. A resume takes an older one, and says so."""


class CodecError(TidemillError, ValueError):
    """Bytes from a file or a process are not what the receiver expects. `core.serialization` raises it."""


# --- policy and training -------------------------------------------------------------------------------------------------


class PolicyMismatch(TidemillError, RuntimeError):
    """Weights are not the ones they claim to be (I1). Engines, transports and checks raise it; it ends the run."""


class BaseMissing(PolicyMismatch):
    """A change came, and its base is not served here. Engines raise it and change nothing; the pool sends all weights."""


class TransferFailed(TidemillError, ConnectionError):
    """Weights did not arrive in time, or a peer is gone. Receivers raise it; the pool tells the engine again."""


class WeightsMoved(TidemillError, LookupError):
    """The trainer was to send a version again, and has other weights by now. The pool waits for the next version."""


class TrainingDiverged(TidemillError, ArithmeticError):
    """The gradient is not finite. The trainer took no step; it ends the run."""


# --- processes -----------------------------------------------------------------------------------------------------------


class StartFailed(TidemillError, RuntimeError):
    """A role could not be started, and the configuration is not the reason. The supervisor tries again."""


class PeerLost(TidemillError, ConnectionError):
    """The process behind a proxy is gone. The engine pool asks another engine; the controller waits for a new trainer."""


class PeerDied(PeerLost):
    """A process ended: `runtime` raises it from every pending call, with the way it ended and the tail of its log."""

    def __init__(self, peer: str, how: str) -> None:
        super().__init__(f"{peer} {how}")
        self.peer, self.how = peer, how


class PeerTimeout(TidemillError, TimeoutError):
    """A call's deadline passed (I4)."""

    def __init__(self, peer: str, method: str, seconds: float) -> None:
        super().__init__(f"{peer} did not answer {method}() within {seconds:g} s")
        self.peer, self.method, self.seconds = peer, method, seconds


class RemoteError(TidemillError, RuntimeError):
    """The other side raised an exception of a type that does not travel; `trace` is its traceback."""

    def __init__(self, peer: str, kind: str, message: str, trace: str) -> None:
        super().__init__(f"{peer} raised {kind}: {message}\n--- traceback in {peer} ---\n{trace}")
        self.peer, self.kind, self.trace = peer, kind, trace


class EngineFailed(TidemillError, RuntimeError):
    """An engine met an error of its own and has stopped. The engine pool asks another one; this one is replaced."""


# --- episodes ------------------------------------------------------------------------------------------------------------


class EpisodeOver(TidemillError):
    """The chat gives no further reply. An environment need not catch it: the attempt ends as it stands."""

    def __init__(self, finish: Finish, reason: str) -> None:
        super().__init__(reason)
        self.finish = finish


class ContextFull(EpisodeOver):
    """The conversation outgrew the context. An environment may catch it and still decide on the attempt."""


class EpisodeFailed(TidemillError):
    """The episode has no outcome, and not by the policy's fault; it becomes an InfraError (I5)."""


class SandboxFailed(EpisodeFailed):
    """The sandbox itself failed, so nothing is known of the program. Rewards and episodes end as an InfraError."""


class CallFailed(EpisodeFailed):
    """Code in a worker process raised an exception. began: not while it loaded what the call needs."""

    def __init__(self, reason: str, trace: str, began: bool) -> None:
        super().__init__(reason)
        self.add_note(trace)
        self.began = began


class WorkerLost(EpisodeFailed):
    """A worker process ended, perhaps because of another call. `runtime.workers` raises it; an episode begins anew, once.

    kind: timeout, died, stopped, protocol, left, cancelled or closed. began: the call had begun, and so may be the cause.
    was_up: it did not end while it started.
    """

    def __init__(self, reason: str, kind: str = "died", began: bool = False, was_up: bool = True) -> None:
        super().__init__(reason)
        self.kind, self.began, self.was_up = kind, began, was_up


class ToolUnavailable(EpisodeFailed):
    """A tool cannot work for a cause outside the policy. Tools raise it; other exceptions of theirs are observations."""


class ToolError(TidemillError):
    """A failure in the tool's own words, which the policy reads without the name of an exception."""

    def __init__(self, reason: str, fault: Literal["error", "late"] = "error") -> None:
        super().__init__(reason)
        self.fault: Literal["error", "late"] = fault


class NoWorkers(TidemillError):
    """A pool of workers is closed, or lost one too many. Environments turn it into EnvironmentLost."""


class EnvironmentLost(TidemillError, RuntimeError):
    """The environment can play no episode any more. It ends the run."""


class Overdue(TidemillError, TimeoutError):
    """A user's code gave no result within its time limit."""


class Exceeds(TidemillError):
    """A text certainly has more tokens than fit. `models` raises it before encoding; the chat ends the episode."""

    def __init__(self, least: int) -> None:
        super().__init__(f"at least {least} tokens")
        self.least = least


class NotImportable(TidemillError, ValueError):
    """A function cannot be written as a module of its own, so it stays in this process. The message says why."""


# --- the server ----------------------------------------------------------------------------------------------------------


class ApiError(TidemillError):
    """Refusal of an HTTP request. The message goes to the client unchanged, in OpenAI's format."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
