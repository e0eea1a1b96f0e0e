"""From sampled tokens to text that may be sent: no half characters, nothing of a stop string.

    token -> Detokenizer (holds what may still become another character) -> StopStrings (holds what may become a stop)

What is sent never changes later. A reply that is streamed and one that is sent whole go through the same code, so they
say the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.models.tokenizer import Tokenizer

BROKEN = "\N{REPLACEMENT CHARACTER}"  # what a decoder shows for bytes that are no character, or not yet
HELD = 16  # tokens that are waited for to complete a character: no tokenizer spreads one over more than a few


class Detokenizer:
    """Text of a growing row of tokens, special tokens left out. Each token is decoded beside those before it, because
    some decoders treat the first token of a row differently."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []  # the tokens whose text was given out last
        self._held: list[int] = []  # tokens that do not yet end in a whole character

    def push(self, token: int) -> str:
        """The text that this token settles."""
        self._held.append(token)
        text, whole = self._fresh(), True
        if text.endswith(BROKEN) or not text:  # not text: special tokens; what came before them stays the context
            if len(self._held) < HELD:
                return ""
            whole = False
        # Broken bytes are no context: with the next byte their own text could change, and it has been given out.
        self._context, self._held = (self._held if whole else []), []
        return text

    def flush(self) -> str:
        """What is still held, broken characters included: no further token comes."""
        text, self._held = self._fresh() if self._held else "", []
        return text

    def _fresh(self) -> str:
        whole = self._tokenizer.decode(self._context + self._held, skip_special_tokens=True)
        return whole[len(self._tokenizer.decode(self._context, skip_special_tokens=True)) :] if self._context else whole


class StopStrings:
    """Cuts a growing text before the first stop string, wherever the pieces it arrives in begin and end."""

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would stop everything"
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """The text that can be sent now."""
        assert not self.found
        text = self._held + text
        # The one that is complete first, and of those the longest: then the pieces' borders cannot matter.
        matches = ((at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0)
        _, at = min(matches, default=(0, -1))
        self.found = at >= 0
        keep = at if self.found else len(text) - self._suspicious(text)
        self._held = "" if self.found else text[keep:]
        return text[:keep]

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text

    def _suspicious(self, text: str) -> int:
        """The length of the longest end of `text` with which a stop string begins."""
        ends = range(min(self._longest - 1, len(text)), 0, -1)
        return next((n for n in ends if any(stop.startswith(text[-n:]) for stop in self._stops)), 0)
