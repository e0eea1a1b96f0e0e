"""Conversion of conversations to tokens, and the mask of tokens that are learnt.

* **Nothing was sampled** (rows that are learnt, compared or scored, and the prompt of a first turn): the tokens are
  those of `tokenizer.apply_chat_template(messages, tokenize=True)` on the whole conversation, and `reply_spans` finds
  those that are learnt. A row ends with the last of them. If a template ends turns without a token of its own, the
  tokenizer's end token follows the last reply and is learnt: otherwise a model would not learn to stop.
* **Something was sampled**: those ids stay, and what comes after them is appended: see `turn_renderers`.

Without a template, a message is its text and a line break; a reply follows and ends with the tokenizer's end token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tidemill.core.errors import ConfigError
from tidemill.core.task_places import named
from tidemill.core.types import Array, Task
from tidemill.models.chat_template import Messages, Tools, Turn, as_messages, assistant, end_of_turn, half_character, render
from tidemill.models.reply_spans import Rendering, reply_spans
from tidemill.models.tokenizer import Tokenizer
from tidemill.models.turn_renderers import PlainRenderer, Renderer, TemplateRenderer, content_of, first, plain_text


def renderer(
    tokenizer: Tokenizer, most: int | None = None, figures: Counter[str] | None = None, tools: Tools = ()
) -> Renderer:
    """The renderer for the tokenizer's template, or a plain one. most, figures, tools: see `Renderer`."""
    kind = TemplateRenderer if tokenizer.chat_template else PlainRenderer
    return kind(tokenizer, most, figures, tools)


def prompt_tokens(tokenizer: Tokenizer, prompt: str | Sequence[Mapping[str, Any]], tools: Tools = ()) -> Array:
    """The tokens of a task's prompt, exactly as an episode's first turn sends them. [P] int32"""
    return renderer(tokenizer, tools=tools).begin(as_messages(prompt))


def completion_of(tokenizer: Tokenizer, prompt: str | Sequence[Mapping[str, Any]], text: str) -> str:
    """The content of a reply that renders as `text` after the prompt or its `<think>`."""
    messages = as_messages(prompt)
    if not tokenizer.chat_template:
        return text
    return content_of(
        lambda each, ask: render(tokenizer, each, ask=ask), messages, render(tokenizer, messages, ask=True), text, []
    )


def conversation(tokenizer: Tokenizer, turns: Sequence[Turn]) -> tuple[Array, Array]:
    """(tokens [T] int32, learnt [T] bool) of a conversation that is complete.

    Learnt are the replies, each with the end of its turn. Raises ConfigError if the template refuses the messages.
    """
    messages, places = Messages(), list[int]()
    for heard, reply in turns:
        messages += heard
        places.append(len(messages))
        messages.append(assistant(reply))
    if half := half_character(messages):
        raise ConfigError(f"the conversation {half}")
    if tokenizer.chat_template:
        rendering, before = Rendering.of(tokenizer, render(tokenizer, messages, ask=False)), []
        spans = reply_spans(rendering, messages, places)
    else:
        text, spans = plain_text(tokenizer, messages, set(places))
        rendering, before = Rendering.of(tokenizer, text), first(tokenizer)
    ids = rendering.ids[: rendering.count(spans[-1][1])]
    learnt = np.zeros(len(ids), np.bool_)
    for span in spans:
        learnt[rendering.tokens(span)] = True
    learnt[:1] = False  # nothing predicts it
    if not ids or ids[-1] not in (end_of_turn(tokenizer), tokenizer.eos_token_id):
        ids, learnt = [*ids, tokenizer.eos_token_id], np.append(learnt, True)
    return np.array([*before, *ids], np.int32), np.append(np.zeros(len(before), np.bool_), learnt)


def check_prompts(tasks: Sequence[Task], tokenizer: Tokenizer, context: int, vocab: int | None = None) -> int:
    """The length of the longest prompt in tokens.

    Raises ConfigError, which names the task, for a prompt that leaves no room for a reply, has ids that the model has no
    embedding for, or is refused by the template. vocab: the number of tokens that the model knows.
    """
    longest = 0
    for task in tasks:
        try:
            tokens = prompt_tokens(tokenizer, task.prompt)
        except ValueError as error:
            raise ConfigError(f"the prompt of {named(task.id)}: {error}") from None
        if len(tokens) >= context:
            raise ConfigError(too_long(len(tokens), context, f"the prompt of {named(task.id)}"))
        if vocab is not None and (unknown := unknown_token(tokens, tokenizer, vocab)):
            raise ConfigError(f"the prompt of {named(task.id)} {unknown}")
        longest = max(longest, len(tokens))
    return longest


def unknown_token(tokens: Array, tokenizer: Tokenizer, vocab: int) -> str:
    """The end of an error sentence if ids have no embedding in a model of `vocab` tokens; else ""."""
    outside = tokens[tokens >= vocab]
    if not len(outside):
        return ""
    text = tokenizer.decode([int(outside[0])], skip_special_tokens=False)
    return (
        f"has the token {text!r}, id {outside[0]}, and the model knows the ids up to {vocab - 1}: the tokenizer has more "
        "tokens than the model's embedding; use the tokenizer that the model was trained with, or resize the embedding"
    )


def too_long(length: int, context: int, what: str, *, at_least: bool = False) -> str:
    count = f"at least {length}" if at_least else str(length)
    return f"{what} is {count} tokens, and the context holds {context}, reply included: shorten it or use a longer context"
