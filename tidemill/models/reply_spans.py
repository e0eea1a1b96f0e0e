"""Spans of the replies in a rendered conversation: content and end of turn.

    text      ...user\\nhi<|im_end|>\\n<|im_start|>assistant\\nyo<|im_end|>\\n<|im_start|>user\\n...
    reply                                                    [............)

A span covers what a sampler would have to produce. It begins where the generation prompt ends, so that what is learnt is
what follows a prompt. Some templates open a reply only when they ask for one (with `<think>`), or render earlier turns
differently, so that there is no such place. Then the span begins where the template's header ends, which is found by
rendering a mark instead of the content. It ends with the first end-of-turn token after the content, tool calls included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tidemill.core.errors import ConfigError
from tidemill.models.chat_template import MARK, Messages, Span, added_tokens, end_of_turn, marked_spans, render, text_of
from tidemill.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Rendering:
    """A conversation's text, its tokens, and the characters of each token."""

    tokenizer: Tokenizer
    text: str
    ids: list[int]
    offsets: Sequence[Span]

    @classmethod
    def of(cls, tokenizer: Tokenizer, text: str) -> Rendering:
        if tokenizer.is_fast:
            found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            return cls(tokenizer, text, found["input_ids"], found["offset_mapping"])
        ids = tokenizer.encode(text, add_special_tokens=False)
        return cls(tokenizer, text, ids, _offsets(tokenizer, text, ids))

    def tokens(self, span: Span) -> range:
        """The tokens that hold a character of the span; the first may begin before it."""
        begin, end = span
        found = [i for i, (b, e) in enumerate(self.offsets) if b < end and e > begin]
        # an added token may include spaces that follow it
        if found and self.offsets[found[0]][0] < begin and self.ids[found[0]] in added_tokens(self.tokenizer):
            found = found[1:]
        return range(found[0], found[-1] + 1) if found else range(0)

    def count(self, position: int) -> int:
        """The number of tokens that begin before a character."""
        return sum(begin < position for begin, _ in self.offsets)


def _offsets(tokenizer: Tokenizer, text: str, ids: list[int]) -> list[Span]:
    """The tokens' spans from the text of each prefix, where they are not reported."""
    if tokenizer.decode(ids, skip_special_tokens=False) != text:
        raise ConfigError(
            f"the tokenizer of {tokenizer.name_or_path!r} does not say where its tokens stand in a text, nor do they decode "
            "to it: use one with a tokenizer.json"
        )
    begins = [tokenizer.decode(ids[:count], skip_special_tokens=False) for count in range(len(ids) + 1)]
    known = [in_common(begin, text) for begin in begins]
    return [(begin, max(end, min(begin + 1, len(text)))) for begin, end in pairwise(known)]


def in_common(one: Sequence[object], other: Sequence[object]) -> int:
    """The length of the longest common prefix."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def reply_spans(rendering: Rendering, messages: Messages, replies: Sequence[int]) -> list[Span]:
    """The spans of the replies (message indices), from the template's marks if any."""
    tokenizer, text = rendering.tokenizer, rendering.text
    said = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    marked = marked_spans(tokenizer, messages, text)
    if len(marked) == len(said):
        spans = [marked[said.index(place)] for place in replies]
        return [(begin, _closed(rendering, end)) for begin, end in spans]
    return [_span(rendering, messages, place) for place in replies]


def _closed(rendering: Rendering, end: int) -> int:
    """The end of a marked span, with the end of turn, which is to be learnt too."""
    ends = _ends(rendering.tokenizer)
    here = rendering.text[:end].rstrip().endswith(tuple(ends))
    after = next((each for each in ends if rendering.text.startswith(each, end)), "")
    return end if here else end + len(after)


def _span(rendering: Rendering, messages: Messages, place: int) -> Span:
    text, tokenizer = rendering.text, rendering.tokenizer
    before, shown, after = _with_mark(tokenizer, messages, place).partition(MARK)
    begin = _begin(tokenizer, messages, place, text, len(before) if shown and text.startswith(before) else len(text))
    end = begin  # end of the content, if the template does not show it
    if shown and text.endswith(after):
        end = max(begin, len(text) - len(after))
    elif shown:  # the text after the reply depends on the content
        said = text_of(messages[place]).strip()
        end = max(begin, text.find(said, begin) + len(said))
    return begin, end + len(_closing(tokenizer, messages, place, text, end))


def _begin(tokenizer: Tokenizer, messages: Messages, place: int, text: str, content: int) -> int:
    """The end of the generation prompt, as far as it is in the text; at most the content's begin."""
    asked = _rendered(tokenizer, messages[:place], ask=True)
    if asked and text.startswith(asked):
        return len(asked)
    if place:  # earlier messages are rendered differently than when it asked: compare what follows the message before
        here = _with_mark(tokenizer, messages, place - 1).partition(MARK)[2]
        there = _with_mark(tokenizer, messages[:place], place - 1, ask=True).partition(MARK)[2]
        if here and there and text.endswith(here):
            return min(len(text) - len(here) + in_common(here, there), content)
    return min(in_common(asked, text), content)


def _closing(tokenizer: Tokenizer, messages: Messages, place: int, text: str, end: int) -> str:
    """The text between the content and the end of the turn, with that end."""
    ends, region = _ends(tokenizer), text[end:]
    if first := next((each for each in ends if region.lstrip().startswith(each)), ""):
        return region[: region.index(first) + len(first)]
    upto = _rendered(tokenizer, messages[: place + 1], ask=False)
    known = bool(upto) and text.startswith(upto) and len(upto) >= end
    region = text[end : len(upto)] if known else region
    found = [at + len(each) for each in ends if (at := region.find(each)) >= 0]
    if not known and "tool_calls" not in messages[place]:
        return ""
    return region[: min(found)] if found else region.rstrip() if known else ""


def _ends(tokenizer: Tokenizer) -> list[str]:
    ids = dict.fromkeys(i for i in (end_of_turn(tokenizer), tokenizer.eos_token_id) if i is not None)
    return [tokenizer.decode([i], skip_special_tokens=False) for i in ids]


def _with_mark(tokenizer: Tokenizer, messages: Messages, place: int, *, ask: bool = False) -> str:
    """The rendering with a mark as the content; "" unless the template shows it exactly once."""
    changed = [{**m, "content": MARK} if i == place else m for i, m in enumerate(messages)]
    text = _rendered(tokenizer, changed, ask=ask)
    return text if text.count(MARK) == 1 else ""


def _rendered(tokenizer: Tokenizer, messages: Messages, *, ask: bool) -> str:
    """The rendering; "" if the template refuses these messages, as it may for part of a conversation."""
    try:
        return render(tokenizer, messages, ask=ask) if messages else ""
    except ConfigError:
        return ""
