"""Fuzzing: a target reads what a stranger wrote, and may only refuse it: in its own errors, soon, in little memory.

`hunt(target, inputs)` makes inputs with hypothesis, which shrinks the first one that makes the target fail. Any exception
that the target does not document is a failure; so is an input that takes longer than HANG_S, and a target whose inputs
together raise the peak of resident memory by more than MEMORY_MB.
"""

from __future__ import annotations

import itertools
import re
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

HANG_S = 20.0  # of a machine that is busy; an input takes milliseconds
MEMORY_MB = 400
Attack = Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Target:
    """`open(folder)` gives the function that is attacked; `refuses` are the errors it may raise."""

    name: str
    inputs: st.SearchStrategy[Any]
    open: Callable[[Path], AbstractContextManager[Attack]]
    refuses: tuple[type[Exception], ...] = ()


@dataclass(slots=True)
class Bag:
    tried: int = 0
    refused: int = 0
    seconds: float = 0.0
    memory_mb: float = 0.0  # by which the peak of resident memory grew


def hunt(target: Target, inputs: int, fixed: bool = True) -> Bag:
    """fixed: the same inputs each time. Raises what a failure raised, after hypothesis has shrunk its input."""
    _forget_peak()
    bag, before, begin = Bag(), _peak_mb(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tidemill-fuzz-") as folder, target.open(Path(folder)) as attack:

        @settings(
            max_examples=inputs,
            deadline=None,
            database=None,
            derandomize=fixed,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink),
        )
        @given(target.inputs)
        def one(given_: Any) -> None:
            bag.tried += 1
            with _alarm(target.name):
                try:
                    attack(given_)
                except target.refuses as error:
                    assert str(error), "an error without a word"
                    bag.refused += 1

        one()
    bag.seconds, bag.memory_mb = time.monotonic() - begin, _peak_mb() - before
    assert bag.memory_mb < MEMORY_MB, f"{target.name} grew by {bag.memory_mb:.0f} MB"
    return bag


@contextmanager
def _alarm(name: str) -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise AssertionError(f"{name} hangs: no end after {HANG_S:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, HANG_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _peak_mb() -> float:
    """The peak of resident memory; since `_forget_peak`, where the system can forget it."""
    if sys.platform == "linux":
        return int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)


def _forget_peak() -> None:
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")


# --- inputs --------------------------------------------------------------------------------------------------------------

NUMBERS = st.sampled_from(
    [0, 1, -1, 2**31, -(2**31) - 1, 2**63 - 1, 2**64, 10**30, 10**400, 1e308, 5e-324, 1e999, float("nan")]
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | NUMBERS | st.text(max_size=12)


def trees(keys: st.SearchStrategy[str], leaves: st.SearchStrategy[Any] = SCALARS) -> st.SearchStrategy[Any]:
    """JSON-like data whose tables tend to have known keys."""
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=5), max_leaves=12
    )


@st.composite
def mutated(draw: st.DrawFn, valid: bytes | st.SearchStrategy[bytes], most: int = 6) -> bytes:
    """A valid input after up to `most` accidents: bits flipped, bytes replaced, cut out, doubled, put in."""
    data = bytearray(valid if isinstance(valid, bytes) else draw(valid))
    for _ in range(draw(st.integers(1, most))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        end = min(len(data), at + draw(st.integers(1, 16)))
        match draw(st.sampled_from(["flip", "set", "cut", "end", "double", "insert"])):
            case "flip" if data:
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "set":
                data[at:end] = draw(st.sampled_from([b"\x00", b"\xff", b"\x7f", b"\x80"])) * (end - at)
            case "cut":
                del data[at:end]
            case "end":
                del data[at:]
            case "double":
                data[end:end] = data[at:end] * draw(st.integers(1, 50))
            case _:
                data[at:at] = draw(st.binary(max_size=12) | st.sampled_from([b"9" * 30, b"[" * 2000, b'{"a":' * 2000]))
    return bytes(data)


def edited(valid: Any, keys: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    """A valid tree, some of whose values are others, or gone."""
    places = list(_places(valid))

    @st.composite
    def edit(draw: st.DrawFn) -> Any:
        changes = {draw(st.sampled_from(places)): draw(trees(keys) | st.just(...)) for _ in range(draw(st.integers(1, 4)))}
        return _with(valid, (), changes)

    return edit()


def _places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from itertools.islice(_places(value, (*path, key)), 40)


def _with(tree: Any, path: tuple[Any, ...], changes: dict[tuple[Any, ...], Any]) -> Any:
    if path in changes:
        return changes[path]
    if isinstance(tree, dict):
        made = {key: _with(value, (*path, key), changes) for key, value in tree.items()}
        return {key: value for key, value in made.items() if value is not ...}
    if isinstance(tree, list):
        return [each for i, value in enumerate(tree) if (each := _with(value, (*path, i), changes)) is not ...]
    return tree
