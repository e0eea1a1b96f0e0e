"""Reply: what an environment gets for a whole conversation."""

from __future__ import annotations

from typing import Any

import msgspec

from tidemill.core.types import Finish


class Reply(msgspec.Struct, frozen=True):
    """The policy's reply to a conversation, as its environment sees it."""

    text: str  # as it was sampled, without the end of the turn
    message: dict[str, Any]  # to go on from: role, content, and tool_calls or reasoning_content if the text has them
    finish: Finish  # STOP; LENGTH: cut at max_tokens; CONTEXT: cut where the context ended
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, served from the prefix cache
    tokens: int = 0  # that were sampled
    faults: tuple[str, ...] = ()  # why calls of tools in the text cannot be read, in one sentence each
