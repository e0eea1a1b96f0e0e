"""Refusals that all engines share: of requests, tokens and versions, each in one sentence."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from tidemill.core.errors import PolicyMismatch
from tidemill.core.token_extras import TokenExtra
from tidemill.core.types import Array, GenerateRequest, SamplingParams, Version


def check_request(asked: GenerateRequest, engine: str, extras: Sequence[TokenExtra], *, holds: bool = False) -> None:
    """Raise ValueError for a constraint, unless the engine `holds` replies to one, and for an extra not among `extras`."""
    if asked.constraint is not None and not holds:
        raise ValueError(f"engine {engine} cannot hold a reply to a grammar: leave out `constraint`")
    if asked.constraint is not None and asked.params.ignore_eos and not asked.params.stop_ids:
        raise ValueError("ignore_eos with `constraint`: a reply ends where its grammar does; leave ignore_eos out")
    if unknown := sorted({*asked.extras} - {extra.name for extra in extras}):
        raise ValueError(f"engine {engine} does not return the token extra {unknown[0]!r}: leave it out of `extras`")


def refuse_asked(engine: str, asked: Mapping[str, bool], why: str = "does not support it") -> None:
    """Raise ValueError for the first feature that is asked for. asked: by its name in the request."""
    if name := next((name for name, on in asked.items() if on), None):
        raise ValueError(f"{name}: engine {engine} {why}; leave it out")


def check_exact(params: SamplingParams, engine: str) -> None:
    """Raise ValueError for parameters whose distribution a server cannot sample, or cannot report."""
    truncated = {"top_p": params.top_p < 1, "top_k": params.top_k > 0, "min_p": params.min_p > 0}
    if params.temperature > 0:
        refuse_asked(engine, truncated, "cannot say which tokens each one was chosen from, so it cannot be trained on")
    refuse_asked(engine, {"top_logprobs": params.top_logprobs > 0}, "does not return those of the unmodified model")
    refuse_asked(engine, {"min_tokens, penalties and logit_bias": params.adjusted})


def check_policy(policy: str, served: Collection[str], engine: str) -> None:
    """Raise ValueError unless `policy` is among those that are served."""
    if policy not in served:
        raise ValueError(f"policy {policy!r} is not served here: engine {engine} serves {', '.join(map(repr, served))}")


def check_temperature(temperature: float) -> None:
    """Raise ValueError for a temperature that nothing can be scored at."""
    if not temperature > 0:
        raise ValueError(f"temperature={temperature!r}: expected a value > 0 to score at")


def checked_tokens(tokens: Array, vocab: int) -> np.ndarray:
    """The tokens [T] as int32. Raises ValueError for what is no row of ids that the model knows."""
    tokens = np.ascontiguousarray(tokens)
    if tokens.ndim != 1 or not len(tokens) or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"tokens of shape {tokens.shape} and dtype {tokens.dtype}: expected a row of at least one token id")
    if tokens.min() < 0 or tokens.max() >= vocab:
        raise ValueError(f"token ids from {tokens.min()} to {tokens.max()}: this model knows 0 to {vocab - 1}")
    return tokens.astype(np.int32)


def check_length(count: int, context: int, reply: int = 0) -> None:
    """Raise ValueError unless `count` tokens, and `reply` more, fit into the context."""
    if count + reply > context:
        what = f"{count} tokens leave no room for a reply" if reply else f"{count} tokens are too many"
        raise ValueError(f"{what}: a sequence here has at most {context}")


def check_forward(new: Version, served: Version, engine: str) -> None:
    """Raise PolicyMismatch unless `new` is of the served policy, and not older."""
    if new.policy != served.policy:
        raise PolicyMismatch(f"{new} is not of the policy that engine {engine} serves ({served})")
    if new.key < served.key:
        raise PolicyMismatch(f"{new} is older than {served}, which engine {engine} serves: versions only go forward")
