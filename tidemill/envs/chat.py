"""EpisodeChat: one seat's conversations with the policy, recorded token by token.

    message -> tokens appended, or a fork -> engine.generate(everything so far) -> sampled tokens appended -> text

The record only grows: see `attempt_tree`. Each token's row is written when the token is made: mask, logprob, version,
support, extras (I1, I7). Text is derived from tokens, for the environment and for people; text of the policy is encoded
again only where history was rewritten, as context that is not trained.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from tidemill.core.attempt_checks import check_row
from tidemill.core.constraints import Constraint, constraint_of
from tidemill.core.errors import ContextFull, EpisodeOver, Exceeds, PolicyMismatch
from tidemill.core.executors import in_thread
from tidemill.core.interfaces import Sampler
from tidemill.core.reply import Reply
from tidemill.core.sampling_support import joined_support
from tidemill.core.seeding import derive_seed
from tidemill.core.token_extras import TokenExtra, TokenExtras, joined, taken
from tidemill.core.types import (
    CUT_AT,
    OWN_LIMIT,
    UNANSWERED,
    Completion,
    Finish,
    GenerateRequest,
    Outcome,
    Said,
    SamplingParams,
    Trajectory,
    Version,
)
from tidemill.envs.agent_chat import AgentChat
from tidemill.envs.attempt_tree import AttemptTree, Node, RecordedRow, ReplyRequest
from tidemill.envs.frozen_policies import FrozenPolicies, reply_text
from tidemill.models.chat_template import Messages, as_messages
from tidemill.models.conversations import renderer, too_long, unknown_token
from tidemill.models.tokenizer import Tokenizer
from tidemill.models.tool_calls import ReplyParts, opens_thought, read_reply
from tidemill.models.turn_renderers import Renderer

T = TypeVar("T")
HERE = 10_000  # a message of at most so many characters is tokenized on the event loop: that takes milliseconds


def rollout_seeds(run_seed: int, group: int, sample: int) -> Callable[[int], int]:
    """The sampling seed by turn for one seat's episode. Evaluation has another first word than "rollout"."""
    return lambda turn: derive_seed(run_seed, "rollout", group, sample, 0, turn)  # 0: the only seat


class EpisodeChat(AgentChat):
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
        self._tree = AttemptTree(partial(renderer, tokenizer, context))
        self._here: Node | None = None  # the latest reply, which `reply` goes on from
        self._begun = 0  # replies that were asked for
        self._cut: dict[str, float] = {}  # the limit that ended the latest reply, if one did
        self._over: EpisodeOver | None = None
        self._busy = False
        self.failure: Exception | None = None  # the engine's exception, to tell it from the environment's own

    @property
    def turns(self) -> int:
        return len(self._tree.replies)

    @property
    def sampled(self) -> int:
        return sum(len(node.reply.tokens) for node in self._tree.replies)

    @property
    def length(self) -> int:
        """Tokens of the conversation so far, of which `reply` goes on."""
        return 0 if self._here is None else self._here.end

    async def reply(
        self,
        message: str | Sequence[Mapping[str, Any]],
        *,
        schema: Any = None,
        max_tokens: int | None = None,
        last: bool = False,
    ) -> str:
        """Add `message` (a user turn, or several messages), sample the policy's answer, return its text.

        Raises ContextFull when no reply fits after the message; ValueError when that is the very first prompt.
        """
        assert not self._busy, "one reply at a time: await the one before"
        if self._over is not None:
            raise self._over
        held = constraint_of(schema)
        self._busy = True
        try:
            messages = as_messages(message)
            request = self._tree.follow(self._here, messages)
            try:
                await _tokenized(messages, lambda: self._placed(request))
            except ContextFull as over:
                self._over = over
                raise
            return (await self._sampled_at(request, held, count_of(max_tokens), bool(last))).text
        finally:
            self._busy = False

    async def complete(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        schema: Any = None,
        max_tokens: int | None = None,
        last: bool = False,
    ) -> Reply:
        """Sample the policy's answer to a whole conversation: see `interfaces.Chat`.

        Several may be under way. Raises ContextFull when no reply fits; ValueError when that is the very first prompt.
        """
        self._expect_going_on()
        request = self._tree.find(whole := as_messages(messages), tools)
        await _tokenized(whole, lambda: self._placed(request))
        return await self._sampled_at(request, constraint_of(schema), count_of(max_tokens), bool(last))

    async def ask(self, policy: str, message: str | Sequence[Mapping[str, Any]], *, max_tokens: int | None = None) -> str:
        """Ask a frozen policy of the run in a conversation of its own: see `interfaces.Chat`.

        Raises PolicyMismatch, which ends the run, when another version than the frozen one answers.
        """
        assert not self._busy, "one reply at a time: await the one before"
        self._expect_going_on()
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

    def rows(self, outcome: Outcome | None = None, finish: Finish | None = None) -> list[Trajectory]:
        """The record so far: the rows of the attempt, the last of which ends with the latest reply and has the outcome.

        finish: given if neither a reply nor the environment ended the episode.
        """
        parts = self._tree.parts() or [RecordedRow(np.zeros(0, np.int32), [], None)]
        rows = [self._row(part) for part in parts]
        end = rows[-1]
        end.finish, end.outcome = finish or self._finish(outcome), outcome
        counts = {**self._tree.figures, UNANSWERED: self._begun - self.turns}
        end.info |= self._cut | {name: float(count) for name, count in counts.items() if count}
        for row in rows:
            check_row(row)
        return rows

    def _row(self, part: RecordedRow) -> Trajectory:
        replies, shift = [node.reply for node in part.nodes], len(part.context)
        turns = [(len(node.given), _entries(node.reply)) for node in part.nodes]
        if turns:
            turns[0] = (shift + turns[0][0], turns[0][1])
        columns = joined(_COLUMNS, turns)
        return Trajectory(
            part.tokens,
            columns["mask"],
            columns["logprobs"],
            columns["versions"],
            finish=replies[-1].finish if replies else Finish.ENV_DONE,
            sources=tuple(sorted({version for reply in replies for version in reply.sources})),
            sample=self._sample,
            turns=len(replies),
            temperature=self._params.temperature,
            text=part.nodes[-1].text if part.nodes else "",
            support=joined_support((reply.support, len(reply.tokens)) for reply in replies),
            parent=part.parent,
            info=_info(replies),
            said=tuple(Said("assistant", str(m["content"]), policy=True) if own else _heard(m) for m, own in part.said),
            extras=joined(self._extras, turns),
        )

    def _placed(self, request: ReplyRequest) -> None:
        """Encode a request. Raises ContextFull or ValueError when no reply would fit."""
        try:
            self._tree.place(request)
        except Exceeds as error:  # too long to be encoded at all
            before = 0 if request.before is None else request.before.end
            raise self._full(before + error.least, at_least=True) from None
        if self._vocab is not None and (unknown := unknown_token(request.added, self._tokenizer, self._vocab)):
            raise ValueError(f"the message {unknown}")
        if request.length >= self._context:
            raise self._full(request.length)

    def _full(self, length: int, *, at_least: bool = False) -> Exception:
        if not self._tree.rows:
            return ValueError(too_long(length, self._context, "the prompt", at_least=at_least))
        return ContextFull(Finish.CONTEXT, too_long(length, self._context, "the conversation", at_least=at_least))

    async def _sampled_at(self, request: ReplyRequest, held: Constraint | None, max_tokens: int | None, last: bool) -> Reply:
        """Sample and record the reply to an encoded request."""
        limit = min(max_tokens or self._params.max_tokens, self._context)  # `max_tokens` may be any large number
        turn, self._begun = self._begun, self._begun + 1
        params = replace(self._params, seed=self._seeds(turn), max_tokens=limit, last=last)
        extras = tuple(extra.name for extra in self._extras)
        asked = GenerateRequest(request.tokens, params, self._policy, self._key, constraint=held, extras=extras)
        reply = await self._sampled(asked, self._taken)
        cut = reply.finish is Finish.LENGTH
        self._cut = {CUT_AT: float(limit), OWN_LIMIT: float(max_tokens is not None)} if cut else {}
        parts = self._read(reply, request.renderer)
        text, message = reply_text(self._tokenizer, reply), parts.message(turn)
        self._here = self._tree.add(request, reply, text, message)
        if reply.finish is Finish.CANCELLED:
            raise self._cancelled()
        full = reply.finish is Finish.CONTEXT
        self._over = ContextFull(Finish.CONTEXT, too_long(self.length, self._context, "the conversation")) if full else None
        counts = (reply.prompt_tokens or request.length, reply.cached_tokens, len(reply.tokens))
        return Reply(text, message, reply.finish, *counts, tuple(parts.faults))

    def _read(self, reply: Completion, renderer: Renderer) -> ReplyParts:
        spoken = (reply.tokens[:-1] if reply.finish is Finish.STOP else reply.tokens).tolist()
        text = self._tokenizer.decode(spoken, skip_special_tokens=not renderer.tools)
        return read_reply(self._tokenizer, text, renderer.tools, opened=opens_thought(renderer.rendered))

    async def _sampled(self, request: GenerateRequest, check: Callable[[Completion], None]) -> Completion:
        """The engine's reply, checked. What is raised here is no fault of the environment."""
        try:
            reply = await self._engine.generate(request)
            check(reply)
        except Exception as error:
            if request.constraint is None or not isinstance(error, ValueError):  # else the schema's fault
                self.failure = error
            raise
        return reply

    def _taken(self, reply: Completion) -> None:
        """Check that the episode's own policy sampled a reply, and keep the token extras that are recorded."""
        if strangers := [source for source in reply.sources if source.policy != self._policy]:
            raise PolicyMismatch(f"policy {self._policy!r} was asked, and {strangers[0].exact} answered")
        reply.extras = taken(self._extras, reply.extras, len(reply.tokens), reply.engine)

    def _expect_going_on(self) -> None:
        if self._over is not None and self._over.finish is Finish.CANCELLED:
            raise self._over

    def _cancelled(self) -> EpisodeOver:
        self._over = EpisodeOver(Finish.CANCELLED, "the episode was cancelled")
        return self._over

    def _finish(self, outcome: Outcome | None) -> Finish:
        if self._over is not None:
            return self._over.finish
        last = Finish.ENV_DONE if self._here is None else self._here.reply.finish
        return Finish.ENV_DONE if last is Finish.STOP and outcome is not None else last


def _info(replies: Sequence[Completion]) -> dict[str, float]:
    return {
        "queued_s": sum(reply.queued_s for reply in replies),
        "prompt_tokens": float(sum(reply.prompt_tokens for reply in replies)),
        "cached_tokens": float(sum(reply.cached_tokens for reply in replies)),
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
