"""Text that is safe to show: it moves no cursor, and every stream can encode it.

A model's text is hostile. `visible` shows control characters as pictures, so that no escape sequence reaches a terminal.
The error handler `DEGRADE` writes a character that a stream's encoding lacks as its nearest ASCII form.
"""

from __future__ import annotations

import codecs
import textwrap

DEGRADE = "tidemill.degrade"
"""Name of an error handler for `open` and `reconfigure`."""

_NEAREST = {
    **{"Δ": "d", "–": "-", "—": "-", "…": "...", "≤": "<=", "≥": ">=", "×": "x", "·": "-", "±": "+-", "→": "->"},
    **{"↵": "\\n", "⇥": "\\t", "␣": "_", "⁻": "-", "⁰": "0", "⁶": "6", "⁹": "9", "’": "'", "‘": "'", "“": '"', "”": '"'},
    **{"━": "-", "─": "-", "╸": "-", "╺": "-", "│": "|", "█": "#"},
}
_SHOWN = {"\n": "↵", "\t": "⇥", "\x7f": "␡", "\u2028": "↵", "\u2029": "↵"}
_REORDERS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")  # bidirectional marks


def _degrade(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_nearest(c) for c in error.object[error.start : error.end]), error.end


def _nearest(character: str) -> str:
    if 0x2400 <= ord(character) <= 0x241F:  # the picture of a control character: in caret notation
        return f"^{chr(ord(character) - 0x2400 + 0x40)}"
    return _NEAREST.get(character, "?")


codecs.register_error(DEGRADE, _degrade)


def visible(text: str) -> str:
    """The text without anything that moves a cursor or reorders it: control characters as pictures."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_picture, text))


def _picture(character: str) -> str:
    code = ord(character)
    if character in _SHOWN:
        return _SHOWN[character]
    if code < 0x20:
        return chr(0x2400 + code)
    hidden = 0x80 <= code < 0xA0 or 0xD800 <= code < 0xE000 or character in _REORDERS
    return "�" if hidden else character


def paragraphs(text: str, width: int, indent: str = "  ", hanging: str = "  ") -> list[str]:
    """The text wrapped to lines of at most `width` characters; a longer word, such as a path, stays whole.

    indent: put before every line. hanging: put after the indent, before every line of a paragraph but the first.
    """
    lines: list[str] = []
    for paragraph in text.splitlines() or [""]:
        lines += textwrap.wrap(
            visible(paragraph),
            max(width, len(indent) + len(hanging) + 20),
            initial_indent=indent,
            subsequent_indent=indent + hanging,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [""]
    return lines
