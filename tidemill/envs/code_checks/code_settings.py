"""Settings of the reward `code`, and the check that there is a sandbox before a run begins."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from tidemill.core.errors import ConfigError
from tidemill.core.task_places import named
from tidemill.core.types import Task
from tidemill.sandbox.sandbox_pool import Sandbox
from tidemill.sandbox.sandbox_settings import SandboxSettings

DEFAULTS: dict[str, Any] = {"seconds": 5.0, "cpu_seconds": 2, "memory_mb": 256, "disk_mb": 16, "output_kb": 256, "warm": 0}
START_S = 2.0  # seconds kept for starting a sandbox
PROBE_S = 300.0


def settings_of(given: Any) -> SandboxSettings:
    """The sandbox of `reward_options.sandbox`: a level's name or a table. Raises ConfigError."""
    table = {"level": given} if isinstance(given, str) else given
    if not isinstance(table, Mapping):
        raise ConfigError(f"reward_options.sandbox = {given!r:.60}: expected a level's name, or a table of settings")
    return SandboxSettings.from_options({**DEFAULTS, **table})


def prepared(options: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """The reward's options with the level that works here, and the seconds that one reply's checks may take.

    limit_s: seconds after which the reward worker is killed, which would be no score. Raises ConfigError.
    """
    settings = settings_of(options.get("sandbox", {}))
    budget_s = limit_s - settings.seconds - START_S
    if budget_s <= 0:
        raise ConfigError(
            f"reward 'code' needs {settings.seconds + START_S:g} s for one program (reward_options.sandbox.seconds and "
            f"{START_S:g} s to start), and scoring.limit_s is {limit_s:g}: raise it, or give a program fewer seconds"
        )
    given = options.get("sandbox", {})
    table = {"level": given} if isinstance(given, str) else dict(given)
    return {**options, "sandbox": {**table, "level": working_level(settings)}, "budget_s": budget_s}


def working_level(settings: SandboxSettings) -> str:
    """The level at which a sandbox of these settings starts on this machine. Raises ConfigError when none does."""
    found = list[str | BaseException]()

    async def probe() -> str:
        async with Sandbox(replace(settings, warm=1)) as sandbox:
            return sandbox.level

    def probed() -> None:
        try:
            found.append(asyncio.run(probe()))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=probed, name="sandbox-probe")  # the caller may be in an event loop already
    thread.start()
    thread.join(PROBE_S)
    if not found:
        raise ConfigError(f"no sandbox has started within {PROBE_S:g} s: see `tidemill doctor`")
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def check_rows(tasks: Iterable[Task]) -> None:
    """Raise ConfigError unless every task has tests or cases that can be read."""
    for task in tasks:
        tests, cases = task.data.get("tests"), task.data.get("cases")
        if tests is None and cases is None:
            raise ConfigError(f"reward 'code': {named(task.id)} has neither `tests` nor `cases`")
        if tests is not None and not (tests_of(tests) and all(isinstance(each, str) for each in tests_of(tests))):
            what = f"tests of {named(task.id)} are {tests!r:.60}"
            raise ConfigError(f"reward 'code': {what}: expected a text or a list of them")
        if cases is not None and not (isinstance(cases, list) and cases and all(map(_is_case, cases))):
            raise ConfigError(
                f"reward 'code': cases of {named(task.id)} are {cases!r:.80}: expected a list of tables with the texts "
                "stdin and stdout"
            )


def tests_of(tests: Any) -> list[Any]:
    """Tests as a list."""
    return [tests] if isinstance(tests, str) else list(tests) if isinstance(tests, list | tuple) else []


def _is_case(case: Any) -> bool:
    return isinstance(case, dict) and isinstance(case.get("stdin", ""), str) and isinstance(case.get("stdout"), str)
