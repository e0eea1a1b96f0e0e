"""Chats to tokens, by the template that the model's folder holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jinja2
import numpy as np

from tidemill.core.types import Array
from tidemill.models.conversations import prompt_tokens
from tidemill.models.tokenizer import Tokenizer

_PROBE = "qzxprobexzq"  # a text that no template writes by itself


def chat_tokens(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> Array:
    """The tokens of a chat, ready for the reply: [P] int32, as from `apply_chat_template`.

    options: further names for the template. Raises ValueError with the template's own message where it fails.
    """
    if not tokenizer.chat_template:
        return prompt_tokens(tokenizer, [dict(message) for message in messages])
    text = rendered(tokenizer, messages, options)
    return np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)


def rendered(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
    """The text of a chat. If the template has no developer role, its messages become the system's."""
    given = [dict(message) for message in messages]
    if any(message["role"] == "developer" for message in given) and not _knows_developers(tokenizer):
        given = [message | {"role": "system"} if message["role"] == "developer" else message for message in given]
    try:
        return _render(tokenizer, given, options)
    except jinja2.TemplateError as error:
        roles = ", ".join(message["role"] for message in given[:20])
        raise ValueError(f"the chat template refuses roles {roles:.200}: {error!s:.500}") from None
    except Exception as error:  # a template may raise anything: it is a program that came with the model
        raise ValueError(f"the chat template failed: {type(error).__name__}: {error!s:.500}") from None


@lru_cache(maxsize=4)
def _knows_developers(tokenizer: Tokenizer) -> bool:
    try:
        probe = [{"role": "developer", "content": _PROBE}, {"role": "user", "content": "a"}]
        return _PROBE in _render(tokenizer, probe, {})
    except Exception:  # the template does not take that role
        return False


def _render(tokenizer: Tokenizer, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, **{"add_generation_prompt": True, **options})
