"""Prompts and chats as tokens that the model accepts, or an ApiError that says why not."""

from __future__ import annotations

import numpy as np

from tidemill.api_formats.requests import ChatInput
from tidemill.core.errors import ApiError
from tidemill.engine.server.prompt_reader import Reader
from tidemill.models.tokenizer import Tokenizer


class Prompts:
    """Tokenizes and checks prompts for one model."""

    def __init__(self, tokenizer: Tokenizer, reader: Reader, *, context: int, vocab: int) -> None:
        """Check against `context` and `vocab`.

        context: tokens of a prompt and its reply together. vocab: ids below it have an embedding.
        """
        self._tokenizer, self._reader, self.context, self._vocab = tokenizer, reader, context, vocab

    async def of_text(
        self, prompt: str | list[int], place: str = "prompt", *, special: bool = True, bounded: bool = True
    ) -> np.ndarray:
        """The tokens of a text or of given ids: [P] int32. Raises ApiError.

        special: add the tokenizer's special tokens. bounded: it must fit the context.
        """
        if isinstance(prompt, str):
            return await self._reader.text(prompt, special=special, bounded=bounded)
        if bounded:
            self._check_length(len(prompt), 0, place, "prompt")
        self.check_ids(prompt, place, "prompt")
        return np.array(prompt, np.int32)

    async def of_chat(self, chat: ChatInput) -> np.ndarray:
        """The tokens of a chat, ready for the reply: [P] int32. Raises ApiError."""
        return await self._reader.chat([message.plain for message in chat.messages], chat.options, chat.offered)

    def check_ids(self, ids: list[int], place: str, param: str) -> None:
        """Raise ApiError for ids that the model has no embedding for."""
        if outside := [token for token in ids if not 0 <= token < self._vocab]:
            message = f"{place}: token id {outside[0]!s:.40}: this model knows 0 to {self._vocab - 1}"
            raise ApiError(message, param=param)

    def check(self, tokens: np.ndarray, wanted: int, place: str, param: str) -> np.ndarray:
        """Return `tokens` if they have embeddings and leave room for a reply. Raises ApiError.

        wanted: tokens of the reply; room for one is enough.
        """
        if not len(tokens):
            raise ApiError(f"{place} has no tokens: give at least one character", param=param)
        self._check_length(len(tokens), min(wanted, 1), place, param)
        if tokens.max() >= self._vocab:
            at = int((tokens >= self._vocab).argmax())
            name = self._tokenizer.convert_ids_to_tokens(int(tokens[at]))
            message = (
                f"{place}: its token {at} is {name!r:.100}, id {tokens[at]}, for which the model has no embedding (it knows "
                f"0 to {self._vocab - 1}, and its tokenizer more): leave that text out"
            )
            raise ApiError(message, param=param)
        return tokens

    def _check_length(self, tokens: int, reply: int, place: str, param: str) -> None:
        if tokens + reply > self.context:
            message = (
                f"{place} is {tokens} tokens, and the context holds {self.context}, reply included: shorten it, "
                "or serve the model with a longer context"
            )
            raise ApiError(message, param=param, code="context_length_exceeded")

    def place_of(self, tokens: np.ndarray, chat: ChatInput) -> str:
        """The message that holds a token which the model does not know, else `messages`."""
        for token in tokens[tokens >= self._vocab][:1].tolist():
            name = str(self._tokenizer.convert_ids_to_tokens(token))
            for i, message in enumerate(chat.messages):
                if name in message.text:
                    return f"messages[{i}]"
        return "messages"
