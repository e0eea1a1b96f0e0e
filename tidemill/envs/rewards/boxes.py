"""Finds the answer in `\\boxed{...}`: the last box of a text, or its last boxes side by side."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\(?!(?:boxed|fbox)).|[{}]", re.DOTALL)  # an escaped brace does not count
_BARE = re.compile(r"\\boxed\s*([0-9A-Za-z])")
_BETWEEN = re.compile(r"(?:[\s,;.$&]|\\[,;:!() \[\]]|\\q?quad|and|or|\\text\{\s*(?:and|or)\s*\})*")


def boxed(text: str) -> str | None:
    """The content of the last complete `\\boxed{...}`, braces balanced; None when there is none."""
    found = last_boxes(text)
    return found[0][-1] if found is not None else None


def last_boxes(text: str) -> tuple[list[str], int] | None:
    """Contents of the last boxes with only commas, "and" or "or" between them, and the place after; None without."""
    found = _places(text)
    if not found:
        bare = list(_BARE.finditer(text))
        return ([bare[-1][1]], bare[-1].end()) if bare else None
    contents, begun = [], found[-1][0]
    for begin, opened, end in reversed(found):
        if contents and (end + 1 > begun or not _BETWEEN.fullmatch(text, end + 1, begun)):
            break
        contents.insert(0, text[opened:end])
        begun = begin
    return contents, found[-1][2] + 1


def _places(text: str) -> list[tuple[int, int, int]]:
    """Places (start, start of content, closing brace) of complete boxes, innermost of nested ones, in one pass."""
    opens = {match.end(): match.start() for match in _BOX.finditer(text)}
    if not opens:
        return []
    stack: list[int] = []
    found: list[tuple[int, int, int]] = []
    for match in _BRACE.finditer(text):
        if match[0] == "{":
            stack.append(match.end())
        elif match[0] == "}" and stack and (opened := stack.pop()) in opens and (not found or opened > found[-1][1]):
            found.append((opens[opened], opened, match.start()))
    return found
