"""Lower bounds of a text's token count, to refuse long texts before tokenizing them.

A tokenizer is analysed part by part. If one of its parts can turn any number of characters into one token, or into none,
there is no such bound (None), and the text has to be tokenized. A text that fits is never refused.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tidemill.models.tokenizer import Tokenizer

_SLICE = 1 << 16  # characters that are processed together
_COMPOSED = 4  # most characters that a normal form of Unicode joins into one
_EVERY_CHARACTER = {"Regex": r"[\s\S]"}
_WHOLE = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength")  # pre-tokenizers that lose nothing
_WITHOUT_BLANKS = ("Whitespace", "WhitespaceSplit", "BertPreTokenizer")


@dataclass(frozen=True, slots=True)
class Reach:
    """The most characters that one token stands for; with `blanks`, besides those."""

    characters: int
    blanks: bool = False

    def least(self, text: str) -> int:
        """The least number of tokens that the text can have."""
        return math.ceil((_inked(text, len(text)) if self.blanks else len(text)) / self.characters)

    def exceeds(self, text: str, tokens: int) -> bool:
        """True if the text certainly has more than `tokens` tokens."""
        most = tokens * self.characters
        return len(text) > most and (not self.blanks or _inked(text, most) > most)


def certainly_exceeds(tokenizer: Tokenizer, text: str, tokens: int) -> int:
    """The least number of tokens of a text if it certainly exceeds `tokens`; else 0."""
    if len(text) <= tokens or (reach := _known(tokenizer, len(tokenizer))) is None or not reach.exceeds(text, tokens):
        return 0
    return reach.least(text)


@lru_cache(maxsize=16)
def _known(tokenizer: Tokenizer, size: int) -> Reach | None:
    return reach_of(tokenizer)


def reach_of(tokenizer: Tokenizer) -> Reach | None:
    """The bound of a tokenizer; None if none can be proven."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    kinds = _Parts()
    if not (kinds.normalizer(_state(backend.normalizer)) and kinds.pre_tokenizer(_state(backend.pre_tokenizer))):
        return None
    if (longest := _of_model(backend, kinds)) is None:
        return None
    added = backend.get_added_tokens_decoder().values()
    found = [longest, *(len(token.content) for token in added)]
    blanks = kinds.blanks or any(token.lstrip or token.rstrip for token in added)
    return None if blanks and kinds.makes_blanks else Reach(max(found) * kinds.shrinks, blanks)


class _Parts:
    """Reads a tokenizer's parts from their saved form; an unknown part is not accepted."""

    def __init__(self) -> None:
        self.shrinks = 1  # characters that become one
        self.blanks = self.makes_blanks = False
        self.bytes = self.characters = False  # the model is given bytes, or single characters

    def normalizer(self, state: dict[str, Any] | None) -> bool:
        match state:
            case None | {"type": "NFD" | "NFKD" | "Lowercase" | "Prepend"}:
                return True
            case {"type": "Sequence", "normalizers": parts}:
                return all(map(self.normalizer, parts))
            case {"type": "NFC" | "NFKC"}:
                self.shrinks *= _COMPOSED
            case {"type": "ByteLevel"}:
                self.bytes = True
            case {"type": "Strip"}:
                self.blanks = True
            case {"type": "Replace", "pattern": {"String": str(given)}, "content": str(content)} if content:
                self.shrinks *= max(1, math.ceil(len(given) / len(content)))
                self.makes_blanks |= any(map(str.isspace, content))
            case _:
                return False
        return True

    def pre_tokenizer(self, state: dict[str, Any] | None) -> bool:
        match state:
            case None:
                return True
            case {"type": "Sequence", "pretokenizers": parts}:
                return all(map(self.pre_tokenizer, parts))
            case {"type": "Split" | "Punctuation", "behavior": str(behavior)} if behavior != "Removed":
                single = state.get("pattern") == _EVERY_CHARACTER and not state.get("invert")
                self.characters |= single and behavior == "Isolated"
                return True
            case {"type": str(kind)} if kind in _WITHOUT_BLANKS:
                self.blanks = True
                return True
            case {"type": str(kind)} if kind in _WHOLE:
                self.bytes |= kind == "ByteLevel"
                return True
        return False


def _of_model(backend: Any, kinds: _Parts) -> int | None:
    """The characters of the longest token; None if a token can stand for text of any length."""
    model, vocabulary = backend.model, backend.get_vocab(with_added_tokens=False)
    longest = max(map(len, vocabulary), default=1)
    kind = type(model).__name__
    if (kind == "BPE" and model.byte_fallback) or (
        kind == "Unigram" and json.loads(model.__getstate__()).get("byte_fallback")
    ):
        return longest if all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)) else None
    if kind == "BPE" and kinds.bytes:
        from tokenizers import pre_tokenizers

        return longest if vocabulary.keys() >= set(pre_tokenizers.ByteLevel.alphabet()) else None
    if kind == "BPE":  # without an unknown token, unknown characters vanish
        return None if model.unk_token is None or model.fuse_unk else longest
    return 1 if kind == "WordLevel" and kinds.characters else None


def _state(part: Any) -> dict[str, Any] | None:
    return None if part is None else json.loads(part.__getstate__())


def _inked(text: str, most: int) -> int:
    """The number of characters that are no blanks; it may stop at any number above `most`."""
    found = 0
    for start in range(0, len(text), _SLICE):
        found += len("".join(text[start : start + _SLICE].split()))
        if found > most:
            break
    return found
