"""Routes that tokenize, detokenize and describe the tokenizer, in vLLM's shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tidemill.api_formats.body_decoding import beside, read
from tidemill.api_formats.parameters import parse, validated
from tidemill.api_formats.requests import DetokenizeBody, TokenizeBody, TokenizeChatBody
from tidemill.core.errors import ApiError
from tidemill.engine.server.prompts import Prompts
from tidemill.models.tokenizer import Tokenizer

MOST_TEXT = 1 << 20  # characters of one request
MOST_TOKENS = 1 << 16  # tokens of one request, or the context if that is more: writing them blocks other requests
TOLD = ("bos_token", "eos_token", "pad_token", "unk_token", "additional_special_tokens", "model_max_length")


class TokenRoutes:
    """The routes' work for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, prompts: Prompts, check_model: Callable[[str | None], None]) -> None:
        self._tokenizer, self._prompts, self._check_model = tokenizer, prompts, check_model
        self._size = max([*tokenizer.added_tokens_decoder, len(tokenizer) - 1]) + 1

    async def tokenize(self, raw: bytes) -> dict[str, Any]:
        """The ids of a text, or of a chat as it is rendered for a reply."""
        body = await beside(raw, _to_tokenize, raw)
        self._check_model(body.model)
        if isinstance(body, TokenizeBody):
            if len(body.prompt) > MOST_TEXT:
                raise ApiError(f"prompt is {len(body.prompt)} characters: expected at most {MOST_TEXT}", param="prompt")
            found = await self._prompts.of_text(body.prompt, special=body.add_special_tokens, bounded=False)
        else:
            found = await self._prompts.of_chat(body)
        self._check_number(len(found), "prompt" if isinstance(body, TokenizeBody) else "messages")
        tokens = found.tolist()
        names = [self._tokenizer.convert_ids_to_tokens(token) for token in tokens] if body.return_token_strs else None
        return {"count": len(tokens), "max_model_len": self._prompts.context, "tokens": tokens, "token_strs": names}

    async def detokenize(self, raw: bytes) -> dict[str, Any]:
        """The text of ids, special tokens included."""
        body = await beside(raw, parse, DetokenizeBody, raw)
        self._check_model(body.model)
        self._check_number(len(body.tokens), "tokens")
        if outside := [token for token in body.tokens if not 0 <= token < self._size]:
            raise ApiError(f"token id {outside[0]!s:.40}: the tokenizer knows 0 to {self._size - 1}", param="tokens")
        return {"prompt": self._tokenizer.decode(body.tokens, skip_special_tokens=False)}

    def _check_number(self, tokens: int, param: str) -> None:
        if tokens > (most := max(MOST_TOKENS, self._prompts.context)):
            raise ApiError(f"{param}: {tokens} tokens, expected at most {most} in a request: give it in parts", param=param)

    def info(self) -> dict[str, Any]:
        """Description of the tokenizer, for a client that tokenizes by itself."""
        about = {key: value for key in TOLD if (value := getattr(self._tokenizer, key, None)) is not None}
        about |= {"tokenizer_class": type(self._tokenizer).__name__, "chat_template": self._tokenizer.chat_template}
        return {key: _plain(value) for key, value in about.items()}


def _to_tokenize(raw: bytes) -> TokenizeBody | TokenizeChatBody:
    tree = read(raw)
    return validated(TokenizeChatBody, tree) if "messages" in tree else validated(TokenizeBody, tree)


def _plain(value: Any) -> Any:
    """A value as JSON can hold it: a special token by its text."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if isinstance(value, dict | str | int | None) else str(value)
