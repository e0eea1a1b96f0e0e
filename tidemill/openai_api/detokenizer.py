"""From sampled tokens to text that may be sent: no half characters, nothing of a stop string.

    token -> Detokenizer (holds what may still become a character) -> StopStrings (holds what may become a stop)

What is sent never changes later. A reply that is streamed and one that is sent whole go through the same code, so they
say the same.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence

from tidemill.openai_api.vocabulary import Vocabulary

_FIRST_MARK, _MOST_MARKS = 0xD800, 0x800  # half surrogates: no text holds them
_MARKS = re.compile(f"[{chr(_FIRST_MARK)}-{chr(_FIRST_MARK + _MOST_MARKS - 1)}]")


class Detokenizer:
    """Text of a growing row of tokens: their bytes, as far as they are whole characters.

    Bytes that are no character are shown as U+FFFD, and never waited for: at most three are held.
    """

    def __init__(self, vocabulary: Vocabulary, *, begun: bool = False, shown: bool = False) -> None:
        """begun: the text goes on behind another. shown: special tokens are part of it."""
        self._vocabulary, self.first, self.shown = vocabulary, not begun, shown
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> tuple[bytes, str]:
        """(the bytes of the token, the text that it settles)"""
        data = self._vocabulary.data(token, self.first, self.shown)
        if self.shown or token not in self._vocabulary.special:
            self.first = False
        return data, self._characters.decode(data)

    def flush(self) -> str:
        """What is still held: no further token comes."""
        return self._characters.decode(b"", True)


class Marks:
    """Special tokens that stand in stop strings. They have no text, so each is a mark in the text that is searched."""

    def __init__(self, stops: Sequence[str], vocabulary: Vocabulary) -> None:
        named = [(name, token) for token, name in vocabulary.special.items() if any(name in stop for stop in stops)]
        self._of = {token: chr(_FIRST_MARK + i) for i, (_, token) in enumerate(named[:_MOST_MARKS])}
        by_name = {name: self._of[token] for name, token in named[:_MOST_MARKS]}
        pattern = "|".join(re.escape(name) for name in sorted(by_name, key=len, reverse=True))
        marked = [re.sub(pattern, lambda match: by_name[match[0]], stop) for stop in stops] if by_name else []
        self.stops = tuple(dict.fromkeys([*stops, *marked]))  # spelt by other tokens, a name is text

    def of(self, token: int) -> str:
        return self._of.get(token, "")


class StopStrings:
    """Cuts a growing text before the first stop string, wherever the pieces it arrives in begin and end.

    Of several the one that is complete first counts, and of those the longest: then the pieces' borders cannot matter.
    Marks in the text are never sent, and only those that a stop string asks for keep it from matching.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would stop everything"
        self._stops = tuple(stops)
        self._held = ""
        self._begun: list[tuple[int, str, int]] = []  # (place in what is held, stop, characters that are there)
        self.found = False

    def push(self, text: str) -> str:
        """The text that can be sent now."""
        assert not self.found
        if not self._stops:
            return text
        at, text = len(self._held), self._held + text
        for i in range(at, len(text)):
            if begins := self._step(i, text[i]):
                self.found, self._held = True, ""
                return _MARKS.sub("", text[: min(begins)])
        keep = min((begin for begin, _, _ in self._begun), default=len(text))
        self._begun = [(begin - keep, stop, count) for begin, stop, count in self._begun]
        self._held = text[keep:]
        return _MARKS.sub("", text[:keep])

    def skip(self, text: str) -> str:
        """As `push`, where no stop string may end."""
        text, self._held, self._begun = self._held + text, "", []
        return _MARKS.sub("", text)

    def flush(self) -> str:
        return self.skip("")

    def _step(self, place: int, character: str) -> list[int]:
        """Where the stop strings begin that are complete with this character."""
        begun, complete = list[tuple[int, str, int]](), list[int]()
        candidates = [*self._begun, *((place, stop, 0) for stop in self._stops)]
        for begin, stop, count in candidates:
            if stop[count] == character:
                if count + 1 == len(stop):
                    complete.append(begin)
                begun.append((begin, stop, count + 1))
            elif count and _MARKS.match(character):
                begun.append((begin, stop, count))
        self._begun = begun
        return complete
