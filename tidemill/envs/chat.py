"""EpisodeChat: one seat's conversation with the policy, recorded token by token.

    message -> tokens appended -> engine.generate(everything so far) -> sampled tokens appended -> text

The record only grows. Each token's row is written when the token is made: mask, logprob, version, support, extras (I1, I7).
Text is derived from tokens, for the environment and for people; text of the policy is never encoded again.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from tidemill.core.attempt_checks import check_row
from tidemill.core.errors import ContextFull, EpisodeOver, Exceeds, PolicyMismatch
from tidemill.core.executors import in_thread
from tidemill.core.interfaces import Sampler
from tidemill.core.seeding import derive_seed
from tidemill.core.token_extras import TokenExtra, TokenExtras, joined, taken
from tidemill.core.types import (
    CUT_AT,
    OWN_LIMIT,
    Array,
    Completion,
    Finish,
    GenerateRequest,
    Outcome,
    Said,
    SamplingParams,
    Support,
    Trajectory,
    Version,
)
from tidemill.envs.frozen_policies import FrozenPolicies, reply_text
from tidemill.models.chat_template import Messages, as_messages
from tidemill.models.conversations import renderer, too_long, unknown_token
from tidemill.models.tokenizer import Tokenizer

T = TypeVar("T")
HERE = 10_000  # a message of at most so many characters is tokenized on the event loop: that takes milliseconds


def rollout_seeds(run_seed: int, group: int, sample: int) -> Callable[[int], int]:
    """The sampling seed by turn for one seat's episode. Evaluation has another first word than "rollout"."""
    return lambda turn: derive_seed(run_seed, "rollout", group, sample, 0, turn)  # 0: the only seat


class EpisodeChat:
    """The chat of one episode, one reply at a time, with its record (implements `interfaces.Chat`)."""

    def __init__(
        self,
        engine: Sampler,
        tokenizer: Tokenizer,
        params: SamplingParams,
        *,
        context: int,
        key: str,
        seeds: Callable[[int], int],
        policy: str = "policy",
        sample: int = 0,
        vocab: int | None = None,
        extras: Sequence[TokenExtra] = (),
        frozen: Mapping[str, Version] | None = None,
    ) -> None:
        """params: with the stop ids; its seed is replaced. context: the limit in tokens. key: the episode's in the engine.

        seeds: from turn 0, 1, ... to its seed. vocab: size of the vocabulary. extras: recorded for each token. frozen:
        policies that `ask` may name, with the versions that are served of them."""
        self._engine, self._tokenizer, self._params, self._context = engine, tokenizer, params, context
        self._key, self._seeds, self._policy, self._sample = key, seeds, policy, sample
        self._vocab, self._extras = vocab, extras
        limits: dict[str, Any] = {"own": policy, "context": context, "vocab": vocab}
        self._frozen = FrozenPolicies(frozen or {}, tokenizer, params, **limits)
        self._asked = 0  # replies of frozen policies so far
        self._renderer = renderer(tokenizer, context)
        self._given: list[Array] = []  # the tokens of each turn's message
        self._replies: list[Completion] = []  # the policy's reply to each message
        self._said: list[Said] = []
        self._cut: dict[str, float] = {}  # the limit that ended the last reply, if one did
        self._text = ""
        self._over: EpisodeOver | None = None
        self._busy = False
        self.failure: Exception | None = None  # the engine's exception, to tell it from the environment's own

    @property
    def turns(self) -> int:
        return len(self._replies)

    @property
    def sampled(self) -> int:
        return sum(len(reply.tokens) for reply in self._replies)

    @property
    def length(self) -> int:
        """Tokens of the conversation so far."""
        return sum(map(len, self._given)) + self.sampled

    async def reply(
        self, message: str | Sequence[Mapping[str, Any]], *, max_tokens: int | None = None, last: bool = False
    ) -> str:
        """Add `message` (a user turn, or several messages), sample the policy's answer, return its text.

        Raises ContextFull when no reply fits after the message; ValueError when that is the very first prompt.
        """
        assert not self._busy, "one reply at a time: await the one before"
        if self._over is not None:
            raise self._over
        self._busy = True
        try:
            messages = as_messages(message)
            added = await _tokenized(messages, lambda: self._added(messages))
            text = await self._turn(added, count_of(max_tokens), bool(last))
            self._said += [*map(_heard, messages), Said("assistant", text, policy=True)]
            return text
        finally:
            self._busy = False

    async def ask(self, policy: str, message: str | Sequence[Mapping[str, Any]], *, max_tokens: int | None = None) -> str:
        """Ask a frozen policy of the run in a conversation of its own: see `interfaces.Chat`.

        Raises PolicyMismatch, which ends the run, when another version than the frozen one answers.
        """
        assert not self._busy, "one reply at a time: await the one before"
        if self._over is not None and self._over.finish is Finish.CANCELLED:
            raise self._over
        self._busy = True
        try:
            messages, most = as_messages(message), count_of(max_tokens)
            seed = derive_seed(self._seeds(self.turns), "ask", self._asked)
            request = await _tokenized(messages, lambda: self._frozen.request(policy, messages, self._key, seed, most))
            reply = await self._sampled(request, lambda reply: self._frozen.check(policy, reply))
            self._asked += 1
            if reply.finish is Finish.CANCELLED:
                raise self._cancelled()
            return reply_text(self._tokenizer, reply)
        finally:
            self._busy = False

    def trajectory(self, outcome: Outcome | None = None, finish: Finish | None = None) -> Trajectory:
        """The record so far. finish: given if neither a reply nor the environment ended the episode."""
        turns = [(len(given), _entries(reply)) for given, reply in zip(self._given, self._replies, strict=True)]
        columns = joined(_COLUMNS, turns)
        record = Trajectory(
            self._tokens(),
            columns["mask"],
            columns["logprobs"],
            columns["versions"],
            finish=finish or self._finish(outcome),
            outcome=outcome,
            sources=tuple(sorted({version for reply in self._replies for version in reply.sources})),
            sample=self._sample,
            turns=self.turns,
            temperature=self._params.temperature,
            text=self._text,
            support=_support(self._replies),
            info=self._info(),
            said=tuple(self._said),
            extras=joined(self._extras, turns),
        )
        check_row(record)
        return record

    def _added(self, messages: Messages) -> Array:
        """The tokens that messages add. Raises ContextFull or ValueError when no reply would fit."""
        try:
            added = self._rendered(messages)
        except Exceeds as error:  # too long to be encoded at all
            raise self._full(self.length + error.least, at_least=True) from None
        if self._vocab is not None and (unknown := unknown_token(added, self._tokenizer, self._vocab)):
            raise ValueError(f"the message {unknown}")
        length = self.length + len(added)
        if length >= self._context:
            raise self._full(length)
        return added

    def _rendered(self, messages: Messages) -> Array:
        if not self._replies:
            return self._renderer.begin(messages)
        last = self._replies[-1]
        stop = int(last.tokens[-1]) if last.finish is Finish.STOP else None
        return self._renderer.follow(self._text, stop, messages, last.tokens)

    def _full(self, length: int, *, at_least: bool = False) -> Exception:
        if not self._replies:
            return ValueError(too_long(length, self._context, "the prompt", at_least=at_least))
        self._over = ContextFull(Finish.CONTEXT, too_long(length, self._context, "the conversation", at_least=at_least))
        return self._over

    async def _turn(self, added: Array, max_tokens: int | None, last: bool) -> str:
        tokens = np.concatenate([self._tokens(), added])
        limit = min(max_tokens or self._params.max_tokens, self._context)  # `max_tokens` may be any large number
        params = replace(self._params, seed=self._seeds(self.turns), max_tokens=limit, last=last)
        asked = GenerateRequest(tokens, params, self._policy, self._key, extras=tuple(e.name for e in self._extras))
        reply = await self._sampled(asked, self._taken)
        self._given.append(added)
        self._replies.append(reply)
        self._cut = {CUT_AT: float(limit), OWN_LIMIT: float(max_tokens is not None)} if reply.finish is Finish.LENGTH else {}
        if reply.finish is Finish.CANCELLED:
            raise self._cancelled()
        if reply.finish is Finish.CONTEXT:
            self._over = ContextFull(Finish.CONTEXT, too_long(self.length, self._context, "the conversation"))
        self._text = reply_text(self._tokenizer, reply)
        return self._text

    async def _sampled(self, request: GenerateRequest, check: Callable[[Completion], None]) -> Completion:
        """The engine's reply, checked. What is raised here is no fault of the environment."""
        try:
            reply = await self._engine.generate(request)
            check(reply)
        except Exception as error:
            self.failure = error
            raise
        return reply

    def _taken(self, reply: Completion) -> None:
        """Check that the episode's own policy sampled a reply, and keep the token extras that are recorded."""
        if strangers := [source for source in reply.sources if source.policy != self._policy]:
            raise PolicyMismatch(f"policy {self._policy!r} was asked, and {strangers[0].exact} answered")
        reply.extras = taken(self._extras, reply.extras, len(reply.tokens), reply.engine)

    def _cancelled(self) -> EpisodeOver:
        self._over = EpisodeOver(Finish.CANCELLED, "the episode was cancelled")
        return self._over

    def _tokens(self) -> Array:
        pieces = [p for given, reply in zip(self._given, self._replies, strict=True) for p in (given, reply.tokens)]
        return _join(pieces, np.int32)

    def _finish(self, outcome: Outcome | None) -> Finish:
        if self._over is not None:
            return self._over.finish
        last = self._replies[-1].finish if self._replies else Finish.ENV_DONE
        return Finish.ENV_DONE if last is Finish.STOP and outcome is not None else last

    def _info(self) -> dict[str, float]:
        return {
            "queued_s": sum(reply.queued_s for reply in self._replies),
            "prompt_tokens": float(sum(reply.prompt_tokens for reply in self._replies)),
            "cached_tokens": float(sum(reply.cached_tokens for reply in self._replies)),
            **self._cut,
            **{name: float(count) for name, count in self._renderer.figures.items() if count},
        }


def count_of(max_tokens: Any) -> int | None:
    """Check the `max_tokens` that an environment gives. Raises ValueError unless a whole number >= 1."""
    try:
        count = None if max_tokens is None else operator.index(max_tokens)
    except TypeError:
        raise ValueError(f"max_tokens is a {type(max_tokens).__name__}: expected a whole number") from None
    if count is not None and count < 1:
        raise ValueError(f"max_tokens={count}: expected a whole number >= 1, or None for the recipe's rollout.max_tokens")
    return count


async def _tokenized(messages: Messages, work: Callable[[], T]) -> T:
    """Do `work`, which tokenizes these messages: in a thread if they are long."""
    large = sum(len(str(each.get("content") or "")) for each in messages) > HERE
    return await in_thread(work) if large else work()


def _heard(message: Mapping[str, Any]) -> Said:
    """A message as text for people: its content, and further fields such as tool calls."""
    content, more = message.get("content"), {k: v for k, v in message.items() if k not in ("role", "content")}
    text = content if isinstance(content, str) else "" if content is None else json.dumps(content, default=str)
    return Said(str(message["role"]), " ".join(filter(None, [text, json.dumps(more, default=str) if more else ""])))


_COLUMNS = (TokenExtra("mask", "bool"), TokenExtra("logprobs", "float32"), TokenExtra("versions", "int32", fill=-1))


def _entries(reply: Completion) -> TokenExtras:
    """The entries that are recorded for each token of a reply."""
    sampled = np.ones(len(reply.tokens), np.bool_)
    return {**reply.extras, "mask": sampled, "logprobs": reply.logprobs, "versions": reply.versions}


def _join(pieces: list[Array], kind: type) -> Array:
    return np.concatenate(pieces).astype(kind, copy=False) if pieces else np.zeros(0, kind)


def _support(replies: list[Completion]) -> Support | None:
    """The supports of all replies as one, whose rows align with the sampled positions in order."""
    parts = [reply.support for reply in replies if reply.support is not None]
    if not parts:
        return None
    assert len(parts) == len(replies), "an engine gave support for some turns of an episode only"
    shifts = np.cumsum([0, *(part.offsets[-1] for part in parts)])
    offsets = [part.offsets[1:] + shift for part, shift in zip(parts, shifts, strict=False)]
    return Support(_join([part.ids for part in parts], np.int32), _join([np.zeros(1, np.int32), *offsets], np.int32))
