"""Turns appended to what was sampled: the ids of before stay, and only what is new is encoded (I7).

With a chat template the tokens to add are found in text. `sent` is the text rendered for the turn before (it ended in the
generation prompt), `reply` what the policy answered.

    full = template(all messages, reply included) + generation prompt
    full must be   sent + reply + tail         else the template rewrites history: refused, by name
    tail           without the stop token's text, when the policy sampled that token itself

The reply becomes the message whose rendering is what was sampled: a generation prompt may have opened it (`<think>`), a
template may add a space of its own. Outer whitespace is no history: a template that trims a reply, or pads it, only makes
the record's text differ from the rendering, which is counted (`text_differs`).

The tail is encoded where it stands, behind the ids since the last added token: text is cut at those, so nothing before them
matters. Where encoding that text does not give those ids again, because what was sampled is no encoding of its text, the
tail is encoded for itself, which is counted too (`encoded_alone`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

from tidemill.core.errors import ConfigError
from tidemill.core.types import Array
from tidemill.models.chat_template import MARK, Messages, added_tokens, render
from tidemill.models.messages import assistant, text_of
from tidemill.models.reply_spans import Rendering
from tidemill.models.token_bounds import certainly_exceeds
from tidemill.models.tokenizer import Tokenizer


class TemplateRewritesHistory(ConfigError):
    """The chat template does not render an earlier turn as it was sent, so that a second turn cannot be appended."""


class Exceeds(Exception):
    """A text has more tokens than fit, which is certain before it is encoded."""

    def __init__(self, least: int) -> None:
        super().__init__(f"at least {least} tokens")
        self.least = least


class Renderer(Protocol):
    """One conversation's way into tokens."""

    figures: Counter[str]
    """`encoded_alone` and `text_differs`: tails."""

    def begin(self, messages: Messages) -> Array:
        """Tokens of the first turn, ready for the policy's reply. [P] int32"""
        ...

    def follow(self, reply: str, stop: int | None, messages: Messages, sampled: Array | None = None) -> Array:
        """Tokens to append after the reply, ready for the next. [n] int32

        stop: the stop id that ended it, if one did. sampled: the reply's tokens, the stop id included; None: those that its
        text has by itself.
        """
        ...


class Tail(NamedTuple):
    text: str
    full: str  # the rendering that it is the end of
    messages: Messages  # of that rendering
    exact: bool  # the record's text is the rendering


class TemplateRenderer:
    def __init__(self, tokenizer: Tokenizer, most: int | None = None) -> None:
        self._record = ConversationRecord(tokenizer, most)
        self._tokenizer, self.figures = tokenizer, self._record.figures
        self._messages: Messages = []
        self._sent = ""

    def begin(self, messages: Messages) -> Array:
        self._messages, self._sent = messages, render(self._tokenizer, messages, ask=True)
        return self._record.begin(self._sent)

    def follow(self, reply: str, stop: int | None, messages: Messages, sampled: Array | None = None) -> Array:
        said = self._record.said(reply, stop, sampled)
        end = "" if stop is None else self._tokenizer.decode([stop], skip_special_tokens=False)
        found: Tail | None = None
        for each in self._tails(said, end, messages):
            found = each if found is None or each.exact else found
            if found.exact:
                break
        if found is None:
            turn = 2 + sum(m["role"] == "assistant" for m in self._messages)
            raise TemplateRewritesHistory(
                f"the chat template of {self._tokenizer.name_or_path!r} rewrites history: with a further turn it renders "
                f"the turns before differently, so turn {turn} cannot be appended to what was sampled; "
                "use a single turn, or a template that only appends"
            )
        self.figures["text_differs"] += not found.exact
        self._messages, self._sent = found.messages, found.full
        return self._record.append(found.text)

    def _tails(self, said: list[str], end: str, messages: Messages) -> Iterator[Tail]:
        """What may follow the reply, by each of the messages that it may have been."""
        for text in said:
            for content in self._contents(text, messages):
                every = [*self._messages, assistant(content), *messages]
                full = render(self._tokenizer, every, ask=True)
                if (cut := after_reply(full, self._sent, text, end)) is not None:
                    yield Tail(cut[0], full, every, cut[1])

    def _contents(self, text: str, messages: Messages) -> Iterator[str]:
        """The text; and if that is not what the template shows, what makes its header and the content prompt and text."""
        yield text
        content = content_of(self._tokenizer, self._messages, self._sent, text, messages)
        if content != text:
            yield content


class PlainRenderer:
    """Without a template: a message is its text and a line break, and the reply follows."""

    def __init__(self, tokenizer: Tokenizer, most: int | None = None) -> None:
        self._record = ConversationRecord(tokenizer, most)
        self._tokenizer, self.figures = tokenizer, self._record.figures

    def begin(self, messages: Messages) -> Array:
        return self._record.begin(lines(messages), first(self._tokenizer))

    def follow(self, reply: str, stop: int | None, messages: Messages, sampled: Array | None = None) -> Array:
        self._record.said(reply, stop, sampled)
        return self._record.append(("\n" if stop is None else "") + lines(messages))


def content_of(tokenizer: Tokenizer, messages: Messages, sent: str, text: str, after: Messages) -> str:
    """The content with which the template shows `text` behind `sent`, its prompt; the text where there is no such content.

    A prompt may have opened the reply (`<think>`), and a template may put something before a content.
    """
    header, found, _ = render(tokenizer, [*messages, assistant(MARK), *after], ask=bool(after)).partition(MARK)
    if not found:
        return text
    if sent.startswith(header):
        return sent.removeprefix(header) + text
    return text.removeprefix(header.removeprefix(sent)) if header.startswith(sent) else text


def lines(messages: Messages) -> str:
    return "".join(f"{text_of(m)}\n" for m in messages)


def first(tokenizer: Tokenizer) -> list[int]:
    """The token that plain text begins with, where the tokenizer says so."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer.encode("", add_special_tokens=True)[:1] == [bos] else []


def after_reply(full: str, sent: str, text: str, end: str) -> tuple[str, bool] | None:
    """What comes after `sent`, `text` and `end` in `full`, and whether all of it stands there to the letter; None where
    `full` does not begin with the first two, outer whitespace of each aside."""
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


class ConversationRecord:
    """The ids of a conversation so far, and text put behind them."""

    def __init__(self, tokenizer: Tokenizer, most: int | None = None) -> None:
        """most: tokens that fit. Raises Exceeds for a text that has more for certain."""
        self._tokenizer, self._most = tokenizer, most
        self._ids: list[int] = []
        self.figures = Counter[str]()

    def begin(self, text: str, before: list[int] | None = None) -> Array:
        self._check(text)
        self._ids = [*(before or []), *self._encode(text)]
        return np.array(self._ids, np.int32)

    def said(self, reply: str, stop: int | None, sampled: Array | None) -> list[str]:
        """Put a reply behind it. Returns what its text is: as it stands in the record, and what cannot be told from that.

        SentencePiece tokenizers put a space before text, at its beginning or after each added token, and take it away again.
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

    def append(self, tail: str) -> Array:
        self._check(tail)
        added = self._encoded(tail)
        self._ids += added
        return np.array(added, np.int32)

    def _encoded(self, tail: str) -> list[int]:
        """The ids of the tail, where it stands if that can be."""
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
        """Those that the text has behind other ids of the context; where a token would lie on both sides, its own."""
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

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""
