"""Requests to the engine pool of a living run, as files in its folder: `tidemill pool` writes them, the run answers.

    pool/ID.request.json    {"pid": of the run, "action": "add" | "remove", "engine": name, "hand_over": bool}
    pool/ID.answer.json     {"engine": name} or {"error": sentence}

Who may write into a run's folder may ask. A request is for one process of the run: a later process never answers it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from tidemill.core.atomic_files import write_json
from tidemill.core.errors import ConfigError, TidemillError
from tidemill.run.storage.run_files import read_json

FOLDER, _REQUEST, _ANSWER = "pool", ".request.json", ".answer.json"
EVERY_S = 0.25
LIMIT_S = 3600.0  # a drained engine ends its longest request first
ENDED = "the run ended before it was done"

Action = Literal["add", "remove"]


class Request(msgspec.Struct, frozen=True):
    """A request for one more engine, or for one less."""

    pid: int
    action: Action
    engine: str = ""  # to be removed
    hand_over: bool = False


class Resizable(Protocol):
    """The part of a run's cluster that requests change."""

    async def join(self) -> str: ...
    async def drain(self, name: str, *, hand_over: bool = False) -> None: ...


@asynccontextmanager
async def answering(folder: Path, pool: Resizable, pid: int) -> AsyncIterator[None]:
    """Answer requests to this process while the body runs. Those that are left at its end are answered by an error."""
    place, doing = folder / FOLDER, dict[Path, asyncio.Task[None]]()

    async def answer(path: Path) -> None:
        told: dict[str, str] = {"error": ENDED}
        try:
            told = await _done(pool, path, pid)
        finally:
            path.unlink(missing_ok=True)
            doing.pop(path)
            with suppress(OSError):  # the folder is gone, or the disk full: who asked gives up by itself
                write_json(path.with_name(path.name.replace(_REQUEST, _ANSWER)), told, lasting=False)

    async def watch() -> None:
        while True:
            for path in sorted(place.glob(f"*{_REQUEST}")):
                if path not in doing:
                    doing[path] = asyncio.create_task(answer(path))
            await asyncio.sleep(EVERY_S)  # bounded: as long as the body runs

    for left in place.glob("*.json"):  # by an earlier process
        left.unlink(missing_ok=True)
    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        for task in (tasks := [watching, *doing.values()]):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _done(pool: Resizable, path: Path, pid: int) -> dict[str, str]:
    """The answer to a request, after it was done or refused."""
    try:
        request = msgspec.convert(read_json(path), Request)
        if request.pid != pid:
            return {"error": f"the request was to process {request.pid}, and the run is process {pid} now: give it again"}
        async with asyncio.timeout(LIMIT_S):
            if request.action == "add":
                return {"engine": await pool.join()}
            await pool.drain(request.engine, hand_over=request.hand_over)
        return {"engine": request.engine}
    except (TidemillError, ValueError, OSError, TimeoutError, msgspec.ValidationError) as error:
        return {"error": str(error).partition("\n")[0] or type(error).__name__}


def ask(folder: Path, request: Request, alive: Callable[[], bool], limit_s: float = LIMIT_S) -> str:
    """Have a living run do what is asked; returns the engine's name. Raises ConfigError with the run's refusal."""
    place, name, end = folder / FOLDER, secrets.token_hex(8), time.monotonic() + limit_s
    place.mkdir(exist_ok=True)
    asked, answer = place / f"{name}{_REQUEST}", place / f"{name}{_ANSWER}"
    write_json(asked, msgspec.to_builtins(request), lasting=False)
    try:
        while not answer.exists() and time.monotonic() < end:
            if not alive():
                raise ConfigError(f"{folder}: {ENDED}")
            time.sleep(EVERY_S / 2)
        if not answer.exists():
            raise ConfigError(f"{folder}: no answer within {limit_s:g} s; `tidemill why` shows what the run waits for")
        told = read_json(answer)
    finally:
        asked.unlink(missing_ok=True)
        answer.unlink(missing_ok=True)
    if "error" in told:
        raise ConfigError(str(told["error"]))
    return str(told["engine"])
