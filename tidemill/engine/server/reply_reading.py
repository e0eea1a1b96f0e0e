"""Reading of whole replies: calls of tools and thoughts in a text, as training reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tidemill.api_formats.replies import TextPiece
from tidemill.api_formats.requests import ChatBody
from tidemill.models.chat_template import template_source
from tidemill.models.tokenizer import Tokenizer
from tidemill.models.tool_calls import THOUGHT, opens_thought, read_reply

END = 16  # tokens at the end of a prompt that show whether it opens the model's thoughts


@dataclass(frozen=True, slots=True)
class ReplyReading:
    """A way to read the reply of a chat, which is not before its end."""

    tokenizer: Tokenizer
    tools: Sequence[Mapping[str, Any]]
    opened: bool  # the prompt opened the model's thoughts
    turn: int  # numbers its calls

    def read(self, piece: TextPiece) -> TextPiece:
        """A whole reply with the message that its text is. One whose calls cannot be read stays text, as it was."""
        parts = read_reply(self.tokenizer, piece.text, self.tools, opened=self.opened)
        if parts.faults and not parts.calls:
            return replace(piece, message={"role": "assistant", "content": piece.text})
        return replace(piece, text=parts.content, message=parts.message(self.turn))


def reading_of(tokenizer: Tokenizer, body: ChatBody, tokens: np.ndarray, thoughts: bool) -> ReplyReading | None:
    """The reading of a chat's reply; None if the reply is its text.

    tokens: the prompt's. thoughts: the API has a place for thoughts, so that they are told apart without tools, too.
    A choice of "required", or of one tool, counts as "auto", as in training: nothing forces a call.
    """
    if not body.offered and not (thoughts and THOUGHT in template_source(tokenizer)):
        return None
    end = tokenizer.decode(tokens[-END:].tolist(), skip_special_tokens=False)
    return ReplyReading(tokenizer, body.offered, opens_thought(str(end)), len(body.messages))
