"""Chat templates: rendering of messages, and the token that ends a turn.

A template is code from elsewhere. Whatever it raises becomes one sentence that names the template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from tidemill.core.errors import ConfigError
from tidemill.models.tokenizer import Tokenizer

Message = dict[str, Any]
Messages = list[Message]
"""`role`, `content` and whatever else a template reads: `name`, `tool_calls`, `tool_call_id`, `reasoning_content`."""

Span = tuple[int, int]  # characters of a rendering, from and up to
MARK = "\ue0f0REPLY\ue0f1"  # private characters: no template looks for them, and none trims them


def render(tokenizer: Tokenizer, messages: Sequence[Message], *, ask: bool) -> str:
    """The text of the whole conversation, as the template renders it.

    ask: add the generation prompt, ready for a reply. Raises ConfigError, in one sentence, whatever the template raises.
    """
    try:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=ask)
    except Exception as error:
        roles = ", ".join(str(m.get("role")) for m in messages)
        why = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"the chat template of {tokenizer.name_or_path!r} refuses roles {roles}: {why}") from None


def marked_spans(tokenizer: Tokenizer, messages: Sequence[Message], text: str) -> list[Span]:
    """Spans between the template's own `{% generation %}` marks in `text`; [] if it has none.

    text: the template's rendering of the messages.
    """
    template = _source(tokenizer)
    if "endgeneration" not in template:
        return []
    from transformers.utils.chat_template_utils import render_jinja_template

    chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
    special: Mapping[str, Any] = getattr(tokenizer, "special_tokens_map", {})
    found: Any = render_jinja_template([chat], chat_template=template, return_assistant_tokens_mask=True, **special)
    (rendered,), (spans,) = found
    return [(begin, end) for begin, end in spans] if rendered == text else []


def end_of_turn(tokenizer: Tokenizer) -> int | None:
    """The token that the template puts after a reply; None if there is none.

    It is the first added token after the reply in a conversation of one turn. Often it is the tokenizer's eos, but not
    for base models that share a chat model's tokenizer: they end turns with one token and documents with another.
    """
    return _end_of_turn(tokenizer, template) if (template := _source(tokenizer)) else None


def _source(tokenizer: Tokenizer) -> str:
    """The template in use when no other is named; "" if there is none."""
    template = tokenizer.chat_template or ""
    return template if isinstance(template, str) else template.get("default", "")


@lru_cache(maxsize=16)
def _end_of_turn(tokenizer: Tokenizer, template: str) -> int | None:
    assert template == _source(tokenizer)
    try:
        text = render(tokenizer, [{"role": "user", "content": "a"}, {"role": "assistant", "content": MARK}], ask=False)
    except ConfigError:
        return None
    _, found, closing = text.rpartition(MARK)
    ids = tokenizer.encode(closing.lstrip(), add_special_tokens=False) if found else []
    return ids[0] if ids and ids[0] in added_tokens(tokenizer) else None


def added_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids of the tokenizer's added tokens, at which text is split before it is encoded.

    Text on one side of such a token does not change how the other side is encoded.
    """
    return _added_tokens(tokenizer, len(tokenizer))


@lru_cache(maxsize=16)
def _added_tokens(tokenizer: Tokenizer, size: int) -> frozenset[int]:
    return frozenset(tokenizer.added_tokens_decoder)
