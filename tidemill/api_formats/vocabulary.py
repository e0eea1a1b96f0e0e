"""Vocabulary: the bytes that each token adds to a text, and the token's name.

The bytes of a reply's tokens, joined, are the bytes of its text, even where a character is spread over several tokens. The
tokenizer's own decoder tells what a token adds. It decodes the token behind another one, since some decoders treat the first
token of a text differently. No decoder shows a part of a character; for such a token the entry in the vocabulary is read:
`<0x0A>` of SentencePiece, or the letters of byte-level BPE.
"""

from __future__ import annotations

import re
from typing import Any

from tidemill.models.tokenizer import Tokenizer

BROKEN = "\N{REPLACEMENT CHARACTER}"  # a decoder's output for bytes that form no character
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary:
    """Bytes and names of a tokenizer's tokens, looked up once each."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._anchor, self._before = _anchor(tokenizer)
        self._found: dict[tuple[int, bool], tuple[bytes, bool]] = {}
        self.special = _special_tokens(tokenizer)  # names by id of the tokens that are left out of texts

    def data(self, token: int, first: bool = False, shown: bool = False) -> bytes:
        """The bytes that a token adds to a text; none for a special token, unless these are `shown`.

        first: the token is the first of its text.
        """
        if token in self.special:
            return self.special[token].encode() if shown else b""
        return self._of(token, first)[0]

    def spelling(self, size: int) -> list[bytes]:
        """The bytes of each id below `size` behind another one; none for special tokens and unknown ids."""
        return [self.data(token) for token in range(size)]

    def name(self, token: int, first: bool = False) -> str:
        """The name of a token shown alone: its text, or `bytes:\\xf0\\x9f` for a part of a character."""
        if token in self.special:
            return self.special[token]
        data, known = self._of(token, first)
        if not known:
            return f"token_id:{token}"
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _of(self, token: int, first: bool) -> tuple[bytes, bool]:
        """The token's bytes, and True if the tokenizer knows it."""
        if (token, first) not in self._found:
            self._found[token, first] = self._look_up(token, first)
        return self._found[token, first]

    def _look_up(self, token: int, first: bool) -> tuple[bytes, bool]:
        name: Any = self._tokenizer.convert_ids_to_tokens(token)
        if name is None:
            return b"", False
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        if not first:
            behind = self._tokenizer.decode([*self._anchor, token], skip_special_tokens=False)
            text = behind.removeprefix(self._before) if behind.startswith(self._before) else text
        return (_part(name) if BROKEN in text else None) or text.encode(), True


def _part(name: str | bytes) -> bytes | None:
    """The bytes that an entry of the vocabulary stands for; None when the entry is a text."""
    if isinstance(name, bytes):
        return name
    if match := _BYTE.fullmatch(name):
        return bytes([int(match[1], 16)])
    letters = _letters()
    return bytes(letters[c] for c in name) if all(c in letters for c in name) else None


def _letters() -> dict[str, int]:
    """Bytes by letter, as byte-level BPE writes them: printable ones unchanged, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _anchor(tokenizer: Tokenizer) -> tuple[list[int], str]:
    """A token whose text does not change when others follow, and its text; both empty if there is none."""
    for letter in ("a", "0", "."):
        for token in reversed(tokenizer.encode(letter, add_special_tokens=False)):
            text, twice = (tokenizer.decode([token] * n, skip_special_tokens=True) for n in (1, 2))
            if text and BROKEN not in text and twice.startswith(text):
                return [token], text
    return [], ""


def _special_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    added = tokenizer.added_tokens_decoder
    return {token: str(entry) for token, entry in added.items() if entry.special} | {
        token: str(tokenizer.convert_ids_to_tokens(token)) for token in tokenizer.all_special_ids
    }
