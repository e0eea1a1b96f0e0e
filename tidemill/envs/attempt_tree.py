"""AttemptTree: the record of one attempt, as a tree of the policy's replies.

    a request begins with a recorded conversation   its tokens stay, and only new text is encoded
    anything else (history that was rewritten)      a fork: the longest beginning that a row shares with it stays
    a reply                                         goes on in the row that it follows; the second one there begins a branch

A sampled token is trained in the row where it was sampled. In branches that begin after it, it is context.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tidemill.core.types import Array, Completion, Finish
from tidemill.models.chat_template import Message, Messages, Tools, as_messages
from tidemill.models.tool_calls import is_reply
from tidemill.models.turn_renderers import Renderer


@dataclass(slots=True, eq=False)
class Row:
    """A conversation in tokens, or a branch of one: replies of the policy, and what was given before each."""

    parent: tuple[Row, int] | None = None  # forked from this row at this position
    context: Array = field(default_factory=lambda: np.zeros(0, np.int32))  # the parent's tokens before that
    theirs: Array = field(default_factory=lambda: np.zeros(0, np.bool_))  # which of these the policy sampled
    nodes: list[Node] = field(default_factory=list)
    text: tuple[int, str] = (0, "")  # its first tokens, so many of them, as text

    @property
    def tokens(self) -> Array:
        """[T] int32"""
        return tokens_of(self.context, self.nodes)

    @property
    def sampled(self) -> Array:
        """[T] bool: the tokens that the policy sampled, here or before the fork."""
        pieces = [self.theirs]
        for node in self.nodes:
            pieces += [np.zeros(len(node.given), np.bool_), np.ones(len(node.reply.tokens), np.bool_)]
        return np.concatenate(pieces)


@dataclass(slots=True, eq=False)
class Node:
    """One reply of the policy."""

    before: Node | None  # the reply that its conversation goes on from
    heard: Messages  # what came after that one, as it was sent
    row: Row
    given: Array  # [n] int32 tokens of its row before it, since the reply before
    reply: Completion
    text: str
    message: Message  # the reply as a message, with its reasoning and its tool calls apart
    end: int  # tokens of its row up to its end
    messages: Messages  # of the whole conversation, as they were rendered, without itself
    renderer: Renderer | None  # ready for what follows; whoever follows first takes it
    tools: Tools  # of the conversation
    after: list[Node] = field(default_factory=list)

    @property
    def stop(self) -> int | None:
        """The stop id that ended the reply, if one did."""
        return int(self.reply.tokens[-1]) if self.reply.finish is Finish.STOP else None

    @property
    def said(self) -> list[tuple[Mapping[str, Any], bool]]:
        """Messages, and whether the policy wrote them."""
        return [*((each, False) for each in self.heard), ({"role": "assistant", "content": self.text}, True)]

    @property
    def parts(self) -> Message | None:
        """The reply as a message for templates that want tool calls apart; None if it has none."""
        return as_messages([self.message])[0] if "tool_calls" in self.message else None


@dataclass(slots=True, eq=False)
class ReplyRequest:
    """The place of a reply that is to be sampled."""

    before: Node | None
    heard: Messages
    renderer: Renderer
    kept: tuple[Row, int] | None = None  # the row's tokens that stay; None: of a conversation that begins anew
    added: Array = field(default_factory=lambda: np.zeros(0, np.int32))

    @property
    def context(self) -> Array:
        return np.zeros(0, np.int32) if self.kept is None else self.kept[0].tokens[: self.kept[1]]

    @property
    def tokens(self) -> Array:
        """[P] int32: the whole prompt."""
        return np.concatenate([self.context, self.added])

    @property
    def length(self) -> int:
        return (0 if self.kept is None else self.kept[1]) + len(self.added)


class AttemptTree:
    """The replies of one attempt. `follow` and `find` say where a reply stands, `place` encodes, `add` records it."""

    def __init__(self, renderer: Callable[[Counter[str], Tools], Renderer]) -> None:
        """renderer: makes one for a conversation with tools, which counts in the figures that it is given."""
        self._renderer = renderer
        self.figures = Counter[str]()
        self.rows: list[Row] = []  # in the order of their first replies
        self.last: Node | None = None  # the latest reply
        self._first: dict[str, list[Node]] = {}  # replies that nothing was before, by the tools of their conversation

    @property
    def replies(self) -> list[Node]:
        return [node for row in self.rows for node in row.nodes]

    def follow(self, before: Node | None, messages: Messages, tools: Tools = ()) -> ReplyRequest:
        """The request of messages that go on from a reply; None: that begin a conversation, with tools."""
        if before is None:
            return ReplyRequest(None, messages, self._renderer(self.figures, tools))
        taken, before.renderer = before.renderer, None
        if taken is None:  # another request went on from there
            taken = self._renderer(self.figures, before.tools)
            taken.resume(before.messages, before.row.tokens[: before.end - len(before.reply.tokens)].tolist())
        return ReplyRequest(before, messages, taken)

    def find(self, messages: Messages, tools: Tools = ()) -> ReplyRequest:
        """The request of a whole conversation. Raises ValueError if the policy's own reply is the last of it."""
        best: Node | None = None
        first = self._first.get(_key(tools), [])
        rest, open_ones = messages, list[tuple[Node | None, Messages]]([(None, messages)])
        while open_ones:
            node, left = open_ones.pop()
            if len(left) < len(rest):
                best, rest = node, left
            for each in first if node is None else node.after:
                count = len(each.heard)
                met = len(left) > count and left[:count] == each.heard
                if met and is_reply(left[count], each.text, each.message):
                    open_ones.append((each, left[count + 1 :]))
        if not rest:
            raise ValueError("the conversation ends with the policy's own reply: add the message that it is to answer")
        return self.follow(best, rest, tools)

    def place(self, request: ReplyRequest) -> None:
        """Encode what a request adds. Raises Exceeds for a text that is too long for certain. Slow for long texts."""
        before, renderer = request.before, request.renderer
        if before is not None:
            added = renderer.follow(before.text, before.stop, request.heard, before.reply.tokens, before.parts)
            if added is not None:
                request.kept, request.added = (before.row, before.end), added
                return
            messages = renderer.replied(before.text, request.heard, before.parts)
        else:
            messages = request.heard
        text = renderer.whole(messages) if self.rows else ""
        for row in self._nearest(renderer, text):
            if count := renderer.shared(tokens := row.tokens, row.sampled, text):
                request.kept, request.added = (row, count), renderer.fork(messages, text, tokens[:count].tolist())
                return
        request.added = renderer.begin(messages)

    def _nearest(self, renderer: Renderer, text: str) -> list[Row]:
        """The rows whose text begins as this one does, those that do so the longest first."""
        found = list[tuple[int, Row]]()
        for row in list(self.rows):  # another request may add one meanwhile
            tokens = row.tokens
            if row.text[0] != len(tokens):
                row.text = len(tokens), renderer.decoded(tokens)
            found.append((common(row.text[1], text), row))
        found.sort(key=lambda each: -each[0])
        return [row for _, row in found[:MOST_COMPARED]]

    def add(self, request: ReplyRequest, reply: Completion, text: str, message: Message) -> Node:
        """Record the reply to a request. message: with its reasoning and its tool calls apart."""
        row, renderer = self._row(request), request.renderer
        end = request.length + len(reply.tokens)
        place = (request.before, request.heard, row, request.added)
        node = Node(*place, reply, text, message, end, renderer.messages, renderer, renderer.tools)
        row.nodes.append(node)
        (self._first.setdefault(_key(node.tools), []) if node.before is None else node.before.after).append(node)
        self.last = node
        return node

    def _row(self, request: ReplyRequest) -> Row:
        if request.kept is not None:
            row, position = request.kept
            if row.nodes and row.nodes[-1].end == position:
                return row
        context, kept = request.context, request.kept
        self.rows.append(Row(kept, context, np.zeros(0, np.bool_) if kept is None else kept[0].sampled[: kept[1]]))
        return self.rows[-1]

    def parts(self) -> list[RecordedRow]:
        """The rows of the record, each after the one that it was forked from; the latest reply ends the last one.

        Where others follow that reply's row, it gets a row of its own.
        """
        rows, last = self.rows, self.last
        if last is None:
            return []
        own, numbers = last.row, {id(row): number for number, row in enumerate(rows)}
        assert own.nodes[-1] is last, "something follows the latest reply"
        found = [RecordedRow(row.context, row.nodes, _numbered(row.parent, numbers)) for row in rows]
        if own is rows[-1]:
            return found
        place = numbers[id(own)]
        if len(own.nodes) == 1:  # nothing was forked from it
            moved = found.pop(place)
            later = [part.moved(place) for part in found]
            return [*later, moved]
        start = last.end - len(last.reply.tokens) - len(last.given)
        found[place] = found[place]._replace(nodes=own.nodes[:-1])
        return [*found, RecordedRow(own.tokens[:start], [last], (place, start))]


class RecordedRow(NamedTuple):
    """A row of the record."""

    context: Array  # [k] int32 tokens before its own
    nodes: list[Node]
    parent: tuple[int, int] | None  # (number of the row, position) that it was forked from

    @property
    def tokens(self) -> Array:
        """[T] int32"""
        return tokens_of(self.context, self.nodes)

    @property
    def said(self) -> list[tuple[Mapping[str, Any], bool]]:
        """The messages of its own turns, and whether the policy wrote them."""
        return [each for node in self.nodes for each in node.said]

    def moved(self, gone: int) -> RecordedRow:
        """The row once the row of the number `gone`, which is not its parent, stands behind it."""
        if self.parent is None or self.parent[0] < gone:
            return self
        return self._replace(parent=(self.parent[0] - 1, self.parent[1]))


MOST_COMPARED = 4  # rows that a rewritten conversation is compared with token by token


def tokens_of(context: Array, nodes: Sequence[Node]) -> Array:
    pieces = [context, *(piece for node in nodes for piece in (node.given, node.reply.tokens))]
    return np.concatenate(pieces).astype(np.int32, copy=False)


def common(a: str, b: str) -> int:
    """The number of characters with which both begin."""
    least, most = 0, min(len(a), len(b))
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if a[least:middle] == b[least:middle] else (least, middle - 1)
    return least


def _numbered(parent: tuple[Row, int] | None, numbers: Mapping[int, int]) -> tuple[int, int] | None:
    return None if parent is None else (numbers[id(parent[0])], parent[1])


def _key(tools: Tools) -> str:
    """The name of some tools, by which conversations are told apart: they are told of them at their beginning."""
    return json.dumps(tools, sort_keys=True, default=str) if tools else ""
