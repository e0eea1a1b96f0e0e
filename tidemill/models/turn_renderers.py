"""Rendering of later turns: sampled ids stay, and only new text is encoded (I7).

With a chat template, the tokens to add are found in text. `sent` is the text rendered for the turn before, which ended
in the generation prompt; `reply` is the policy's answer.

    full = template(all messages, reply included) + generation prompt
    full must be   sent + reply + tail         else the template rewrites history
    tail           without the stop token's text, when the policy sampled that token itself

Where history is rewritten, by the template or by whoever sends the messages, the record forks: `fork` keeps the tokens of an
earlier row that the new rendering begins with (`shared`), and appends the rest of its text as a tail.

The reply becomes the message that renders as what was sampled: a generation prompt may have opened it (`<think>`), and a
template may add a space of its own. Outer whitespace is not history: if a template trims or pads a reply, the record's
text merely differs from the rendering, which is counted (`text_differs`).

The tail is encoded in its place, after the ids since the last added token, where text is split. If that does not give
those ids again, because what was sampled is no encoding of its text, it is encoded by itself (counted: `encoded_alone`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tidemill.core.errors import ConfigError, Exceeds
from tidemill.core.types import Array
from tidemill.models.call_syntax import python_call
from tidemill.models.chat_template import (
    MARK,
    Message,
    Messages,
    Span,
    Tools,
    added_texts,
    added_tokens,
    assistant,
    render,
    text_of,
)
from tidemill.models.reply_spans import Rendering
from tidemill.models.token_bounds import certainly_exceeds
from tidemill.models.tokenizer import Tokenizer
from tidemill.models.tool_calls import takes_tools, told

Rendered = Callable[[Messages, bool], str]
"""The text of a conversation, with the generation prompt or without."""


class Renderer(ABC):
    """Turns one conversation into tokens, turn by turn."""

    def __init__(
        self, tokenizer: Tokenizer, most: int | None = None, figures: Counter[str] | None = None, tools: Tools = ()
    ) -> None:
        """most: tokens that fit. A text that has more for certain raises Exceeds. figures: to count in, see `figures`.

        tools: of the whole conversation."""
        self._tokenizer, self._most, self.tools = tokenizer, most, tools
        self._ids: list[int] = []  # of the conversation so far
        self.messages: Messages = []  # of the conversation so far, as they were rendered
        self.figures = Counter[str]() if figures is None else figures
        """`encoded_alone` and `text_differs`: numbers of tails."""

    @abstractmethod
    def begin(self, messages: Messages) -> Array:
        """Tokens of the first turn, ready for the policy's reply. [P] int32"""

    @abstractmethod
    def follow(
        self,
        reply: str,
        stop: int | None,
        messages: Messages,
        sampled: Array | None = None,
        parts: Message | None = None,
    ) -> Array | None:
        """Tokens to append after the reply, ready for the next one, [n] int32; None if the template rewrites history.

        stop: the stop id that ended the reply, if one did. sampled: the reply's tokens, the stop id included; None: the
        reply was not sampled, and its text is encoded. parts: the reply as a message with its tool calls apart, for
        templates that want them so.
        """

    @property
    @abstractmethod
    def rendered(self) -> str:
        """The text of the conversation so far, ready for the policy's reply; "" without a template."""

    @abstractmethod
    def whole(self, messages: Messages) -> str:
        """The text of a whole conversation, ready for the policy's reply."""

    @abstractmethod
    def resume(self, messages: Messages, ids: Sequence[int]) -> None:
        """Take up a conversation where it asks for a reply. ids: its tokens."""

    def replied(self, reply: str, messages: Messages, parts: Message | None = None) -> Messages:
        """The conversation with a reply and further messages, as it is to be rendered anew. parts: see `follow`."""
        return [*self.messages, assistant(reply), *messages]

    def fork(self, messages: Messages, text: str, kept: Sequence[int]) -> Array:
        """Tokens to append to `kept` for a conversation whose history was rewritten, [n] int32.

        text: the conversation's, see `whole`, which begins with that of `kept`.
        """
        self.resume(messages, kept)
        return self._append(text[len(self._decode([*kept])) :])

    def shared(self, ids: Array, sampled: Array, text: str) -> int:
        """The number of a row's first tokens that a rewritten conversation keeps; 0 if none of them was sampled.

        ids, sampled: [T] tokens of the row, and which the policy sampled. text: the conversation's. It keeps what has the
        same text, up to the end of a reply's tokens or of an added token: nothing before such a place decides how text
        after it is encoded. With SentencePiece, which puts spaces of its own into the text, it often keeps nothing.
        """
        least, most = 0, len(ids)
        while least < most:
            middle = (least + most + 1) // 2
            if text.startswith(self._decode(ids[:middle].tolist())):
                least = middle
            else:
                most = middle - 1
        for more in range(least + 1, min(least + 4, len(ids)) + 1):  # a character of several tokens is none until its last
            if text.startswith(self._decode(ids[:more].tolist())):
                least = more
        cuts = added_tokens(self._tokenizer)
        while least and not (
            (sampled[least - 1] or int(ids[least - 1]) in cuts)
            and not self._splits(self._decode(ids[:least].tolist()), text)
        ):
            least -= 1
        return least if sampled[:least].any() else 0

    def _splits(self, begin: str, text: str) -> bool:
        """True if `begin` ends within the text of an added token in `text`, which begins with it."""
        names = added_texts(self._tokenizer)
        most = max(map(len, names), default=0)
        place, around = min(len(begin), most), text[max(0, len(begin) - most) : len(begin) + most]
        return any(
            around.startswith(name, place - before) for name in names for before in range(1, min(len(name), place + 1))
        )

    def _begin(self, text: str, before: Sequence[int] = ()) -> Array:
        self._check(text)
        self._ids = [*before, *self._encode(text)]
        return np.array(self._ids, np.int32)

    def _said(self, reply: str, stop: int | None, sampled: Array | None) -> list[str]:
        """Append a reply; return its possible texts: in its place, and by itself.

        SentencePiece tokenizers put a space before text, at its beginning or after each added token, and take it away
        again; then the two cannot be told apart.
        """
        if sampled is None:
            self._ids += [*self._encode(reply), *([] if stop is None else [stop])]
            return [reply]
        ids, before = sampled.tolist(), self._ids[-1:]
        spoken = ids if stop is None else ids[:-1]
        self._ids += ids
        whole, context, alone = self._decode([*before, *spoken]), self._decode(before), self._decode(spoken)
        if not whole.startswith(context):  # parts of a character on both sides
            return [alone]
        here = whole.removeprefix(context)
        same = here != alone and self._decode(self._encode(context + alone)) == whole
        return [here, alone] if same else [here]

    def _append(self, tail: str) -> Array:
        self._check(tail)
        added = self._encoded(tail)
        self._ids += added
        return np.array(added, np.int32)

    def _encoded(self, tail: str) -> list[int]:
        cuts = added_tokens(self._tokenizer)
        own = self._encode(tail)
        if not tail or own[0] in cuts:
            return own
        begin = next((i for i in reversed(range(len(self._ids))) if self._ids[i] in cuts), 0)
        before = self._ids[begin:]
        context = self._decode(before)
        found = self._encode(context + tail)
        if found[: len(before)] == before:
            return found[len(before) :]
        self.figures["encoded_alone"] += 1
        return self._alone(context, tail, own)

    def _alone(self, context: str, tail: str, own: list[int]) -> list[int]:
        """The tail's ids after another encoding of the context, or its own if a token lies across both."""
        rendering = Rendering.of(self._tokenizer, context + tail)
        start = rendering.tokens((len(context), len(rendering.text))).start
        if rendering.count(len(context)) <= start:
            return rendering.ids[start:]
        last = self._ids[-1:]
        wanted = self._decode(last) + tail
        return next((ids for ids in (own, own[1:]) if self._decode([*last, *ids]) == wanted), own)

    def _check(self, text: str) -> None:
        if self._most is not None and (least := certainly_exceeds(self._tokenizer, text, self._most)):
            raise Exceeds(least)

    def decoded(self, tokens: Array) -> str:
        """Tokens as text, special ones included."""
        return self._decode(tokens.tolist())

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""


class Tail(NamedTuple):
    text: str
    full: str  # the rendering that it is the end of
    messages: Messages  # the messages of that rendering
    exact: bool  # the record's text equals the rendering


class TemplateRenderer(Renderer):
    _sent: str  # the rendering of `messages`

    def begin(self, messages: Messages) -> Array:
        self.messages, self._sent = messages, self.whole(messages)
        return self._begin(self._sent)

    @property
    def rendered(self) -> str:
        """The text of the conversation so far, ready for the policy's reply."""
        return self._sent

    def whole(self, messages: Messages) -> str:
        return self._render(messages, True)

    def resume(self, messages: Messages, ids: Sequence[int]) -> None:
        self.messages, self._sent, self._ids = messages, self.whole(messages), [*ids]

    def replied(self, reply: str, messages: Messages, parts: Message | None = None) -> Messages:
        try:
            content = content_of(self._render, self.messages, self._sent, reply, messages)
            found = super().replied(content, messages)
            if parts:
                self.whole(found)
            return found
        except ConfigError:
            if not parts:
                raise
            return [*self.messages, parts, *messages]

    def follow(
        self,
        reply: str,
        stop: int | None,
        messages: Messages,
        sampled: Array | None = None,
        parts: Message | None = None,
    ) -> Array | None:
        said = self._said(reply, stop, sampled)
        end = "" if stop is None else self._tokenizer.decode([stop], skip_special_tokens=False)
        found: Tail | None = None
        for each in self._tails(said, end, messages, parts):
            found = each if found is None or each.exact else found
            if found.exact:
                break
        if found is None:
            return None
        self.figures["text_differs"] += not found.exact
        self.messages, self._sent = found.messages, found.full
        return self._append(found.text)

    def _tails(self, said: list[str], end: str, messages: Messages, parts: Message | None) -> Iterator[Tail]:
        """Possible tails after the reply, one for each message that the reply may have been."""
        try:
            for text in said:
                for content in self._contents(text, messages):
                    every = [*self.messages, assistant(content), *messages]
                    full = self.whole(every)
                    if (cut := after_reply(full, self._sent, text, end)) is not None:
                        yield Tail(cut[0], full, every, cut[1])
        except ConfigError:  # a template may want tool calls apart before their results
            if not parts:
                raise
        if parts and end:
            before = [*self.messages, parts]
            closed, full = self._render(before, False), self.whole([*before, *messages])
            place = closed.rfind(end, len(self._sent)) + len(end)
            if closed.startswith(self._sent) and place >= len(self._sent) + len(end) and full.startswith(closed[:place]):
                shown = closed[len(self._sent) : place - len(end)]
                if str(parts.get("reasoning_content") or "").strip() in shown:  # else the template takes thoughts out
                    yield Tail(full[place:], full, [*before, *messages], shown in said)

    def _contents(self, text: str, messages: Messages) -> Iterator[str]:
        yield text
        content = content_of(self._render, self.messages, self._sent, text, messages)
        if content != text:
            yield content

    def _render(self, messages: Messages, ask: bool) -> str:
        if self.tools and not takes_tools(self._tokenizer):
            try:
                return render(self._tokenizer, told(messages, self.tools), ask=ask)
            except ConfigError:  # it has no system's role
                return render(self._tokenizer, told(messages, self.tools, system=False), ask=ask)
        return render(self._tokenizer, messages, ask=ask, tools=self.tools)


class PlainRenderer(Renderer):
    """Renderer without a template: a message is its text and a line break, and the reply follows."""

    def begin(self, messages: Messages) -> Array:
        self.messages = messages
        return self._begin(lines(messages), first(self._tokenizer))

    @property
    def rendered(self) -> str:
        return ""  # nothing opens a reply

    def whole(self, messages: Messages) -> str:
        replies = {place for place, message in enumerate(messages) if message["role"] == "assistant"}
        return self._decode(first(self._tokenizer)) + plain_text(self._tokenizer, messages, replies)[0]

    def resume(self, messages: Messages, ids: Sequence[int]) -> None:
        self.messages, self._ids = messages, [*ids]

    def follow(
        self,
        reply: str,
        stop: int | None,
        messages: Messages,
        sampled: Array | None = None,
        parts: Message | None = None,
    ) -> Array:
        self.messages = self.replied(reply, messages)
        self._said(reply, stop, sampled)
        return self._append(("\n" if stop is None else "") + lines(messages))


def content_of(rendering: Rendered, messages: Messages, sent: str, text: str, after: Messages) -> str:
    """The content that the template renders as `text` after `sent`; the text if there is none."""
    header, found, _ = rendering([*messages, assistant(MARK), *after], bool(after)).partition(MARK)
    if not found:
        return text
    if sent.startswith(header):  # the prompt has opened the reply, as with `<think>`
        return sent.removeprefix(header) + text
    return text.removeprefix(header.removeprefix(sent)) if header.startswith(sent) else text


def lines(messages: Messages) -> str:
    return "".join(f"{plain(m)}\n" for m in messages)


def plain(message: Message) -> str:
    """A message without a template: its text, or its tool calls as `tool_calls` reads them."""
    return text_of(message) or "\n".join(map(python_call, message.get("tool_calls") or ()))


def plain_text(tokenizer: Tokenizer, messages: Messages, places: set[int]) -> tuple[str, list[Span]]:
    """(text, spans of the replies in it) of a conversation without a template."""
    text, spans = "", list[Span]()
    end = tokenizer.decode([tokenizer.eos_token_id], skip_special_tokens=False)
    for place, message in enumerate(messages):
        own = plain(message) + end if place in places else lines([message])
        if place in places:
            spans.append((len(text), len(text) + len(own)))
        text += own
    return text, spans


def first(tokenizer: Tokenizer) -> list[int]:
    """The token that plain text begins with, if the tokenizer adds one."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer.encode("", add_special_tokens=True)[:1] == [bos] else []


def after_reply(full: str, sent: str, text: str, end: str) -> tuple[str, bool] | None:
    """(what follows `sent`, `text` and `end` in `full`, True if all of it is there to the letter).

    None if `full` does not begin with `sent` and `text`, outer whitespace of each aside.
    """
    exact, kept = True, text
    if not full.startswith(sent):
        exact, sent = False, sent.rstrip()
    if not full.startswith(sent):
        return None
    rest = full[len(sent) :]
    if not rest.startswith(text):
        exact, rest, kept = False, rest.lstrip(), text.strip()
    if not rest.startswith(kept):
        return None
    rest = rest[len(kept) :]
    if kept != text:
        rest = rest.removeprefix(text[len(text.rstrip()) :])
    if end and not rest.startswith(end):
        exact = False
        rest = rest.lstrip() if rest.lstrip().startswith(end) else rest
    return rest.removeprefix(end), exact
