"""Versions of a reply's tokens, from the spans of weight versions that vLLM and SGLang return with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tidemill.core.errors import PolicyMismatch
from tidemill.core.types import Version


def spans_of(
    spans: Iterable[Mapping[str, Any]] | None, count: int, labels: Mapping[str, Version], server: str
) -> list[tuple[Version, int]]:
    """The versions that sampled a reply of `count` tokens, each with its number of tokens, in order.

    labels: the versions by the names that the server gives its weights. Raises PolicyMismatch unless the spans are of known
    versions and cover every token once.
    """
    found, at = list[tuple[Version, int]](), 0
    for span in spans or ():
        if (version := labels.get(span["version"])) is None:
            raise PolicyMismatch(
                f"{server} sampled with weights that it calls {span['version']!r}, which were never published"
            )
        if span["start"] != at:
            raise PolicyMismatch(f"{server} names no weights for the tokens {at} to {span['start']} of a reply")
        found.append((version, span["end"] - at))
        at = span["end"]
    if at != count:
        raise PolicyMismatch(f"{server} names the weights of {at} of the {count} tokens of a reply")
    return [(version, tokens) for version, tokens in found if tokens]
