"""Exceptions of a user's code in words, with the file and line of theirs.

ValueError: no such column (agent.py:12)
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from traceback import walk_tb

from tidemill.core.outcomes import SHOWN, clip

TOLD = 500  # characters of a reason, in which what `raised` returns fits
_OURS = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
_STANDARD = os.path.join(os.path.dirname(os.__file__), "")
_INSTALLED = {"site-packages", "dist-packages"}


def raised(error: BaseException, most: int = SHOWN) -> str:
    """An exception's type and text, and the place in the user's code that raised it or called what did.

    most: characters of the text.
    """
    try:
        text = clip(str(error), most)
    except Exception:  # a user's exception: even its text may fail
        text = "it has no text"
    place = place_of(error)
    return f"{type(error).__name__}: {text}" + (f" ({place})" if place else "")


def place_of(error: BaseException) -> str:
    """FILE:LINE of the innermost frame that lies in a file of the user; "" if there is none.

    Files of this package, of Python and of installed packages are not the user's.
    """
    return next(reversed([*_places(error)]), "")


def _places(error: BaseException) -> Iterator[str]:
    for frame, line in walk_tb(error.__traceback__):
        path = frame.f_code.co_filename
        if not path.startswith((_OURS, _STANDARD)) and _INSTALLED.isdisjoint(path.split(os.sep)) and os.path.isfile(path):
            yield clip(f"{os.path.basename(path)}:{line}", 80)
