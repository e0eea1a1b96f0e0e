"""Detokenizer: sampled tokens to text that can be sent, whole characters and no stop strings.

    token -> Detokenizer (holds back incomplete characters) -> StopStrings (holds back what may become a stop string)

Text that was sent never changes later. Streamed replies and whole replies go through the same code, so they are equal.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence

from tidemill.api_formats.vocabulary import Vocabulary

_FIRST_MARK, _MOST_MARKS = 0xD800, 0x800  # half surrogates, which no text contains
_MARKS = re.compile(f"[{chr(_FIRST_MARK)}-{chr(_FIRST_MARK + _MOST_MARKS - 1)}]")


class Detokenizer:
    """Converts a growing row of tokens to text, one whole character at a time.

    Bytes that form no character become U+FFFD at once; at most three bytes are held back.
    """

    def __init__(self, vocabulary: Vocabulary, *, begun: bool = False, shown: bool = False) -> None:
        """begun: the text continues another one. shown: special tokens are part of the text."""
        self._vocabulary, self.first, self.shown = vocabulary, not begun, shown
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> tuple[bytes, str]:
        """Add a token; returns its bytes, and the text that is now complete."""
        data = self._vocabulary.data(token, self.first, self.shown)
        if self.shown or token not in self._vocabulary.special:
            self.first = False
        return data, self._characters.decode(data)

    def flush(self) -> str:
        """The text still held back, when no further token comes."""
        return self._characters.decode(b"", True)


class Marks:
    """Marks that stand for special tokens in stop strings, because such tokens have no text."""

    def __init__(self, stops: Sequence[str], vocabulary: Vocabulary) -> None:
        named = [(name, token) for token, name in vocabulary.special.items() if any(name in stop for stop in stops)]
        self._of = {token: chr(_FIRST_MARK + i) for i, (_, token) in enumerate(named[:_MOST_MARKS])}
        by_name = {name: self._of[token] for name, token in named[:_MOST_MARKS]}
        pattern = "|".join(re.escape(name) for name in sorted(by_name, key=len, reverse=True))
        marked = [re.sub(pattern, lambda match: by_name[match[0]], stop) for stop in stops] if by_name else []
        self.written = dict(zip(marked, stops, strict=False))  # stop strings by their form with marks
        self.stops = tuple(dict.fromkeys([*stops, *marked]))  # both: ordinary tokens may spell a name as text

    def of(self, token: int) -> str:
        return self._of.get(token, "")


class StopStrings:
    """Cuts a growing text before the first stop string, however the text is split into pieces.

    If there are several stop strings, the one that is complete first counts, and of those the longest, so the result does
    not depend on the pieces. Marks in the text are never sent; a match skips over the marks that its stop string does not
    contain.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would stop everything"
        self._stops = tuple(stops)
        self._held = ""
        self._begun: list[tuple[int, str, int]] = []  # partial matches: (place in `_held`, stop, characters matched)
        self.stop = ""  # the one that was found

    @property
    def found(self) -> bool:
        return bool(self.stop)

    def push(self, text: str) -> str:
        """The text that can be sent now."""
        assert not self.found
        if not self._stops:
            return text
        at, text = len(self._held), self._held + text
        for i in range(at, len(text)):
            if begins := self._step(i, text[i]):
                begin, self.stop = min(begins, key=lambda each: each[0])
                self._held = ""
                return _MARKS.sub("", text[:begin])
        keep = min((begin for begin, _, _ in self._begun), default=len(text))
        self._begun = [(begin - keep, stop, count) for begin, stop, count in self._begun]
        self._held = text[keep:]
        return _MARKS.sub("", text[:keep])

    def skip(self, text: str) -> str:
        """Add text in which no stop string may end; returns all text held back until now with it."""
        text, self._held, self._begun = self._held + text, "", []
        return _MARKS.sub("", text)

    def flush(self) -> str:
        return self.skip("")

    def _step(self, place: int, character: str) -> list[tuple[int, str]]:
        """The stop strings that this character completes, with the places where they begin."""
        begun, complete = list[tuple[int, str, int]](), list[tuple[int, str]]()
        candidates = [*self._begun, *((place, stop, 0) for stop in self._stops)]
        for begin, stop, count in candidates:
            if stop[count] == character:
                if count + 1 == len(stop):
                    complete.append((begin, stop))
                begun.append((begin, stop, count + 1))
            elif count and _MARKS.match(character):
                begun.append((begin, stop, count))
        self._begun = begun
        return complete
