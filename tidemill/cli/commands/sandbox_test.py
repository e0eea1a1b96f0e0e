"""The finding of `tidemill doctor` about the sandbox: its level, and attempts to get out of it."""

from __future__ import annotations

import asyncio

from tidemill.cli.commands.doctor import DoctorFinding
from tidemill.core.errors import ConfigError
from tidemill.sandbox.escapes.suite import run_suite, small_limits
from tidemill.sandbox.sandbox_pool import INSTALL, Sandbox

NAME = "sandbox"


def sandbox() -> DoctorFinding:
    """The strongest level that works here, and what came of the escape suite in it."""
    try:
        return asyncio.run(_tried())
    except ConfigError as error:
        advice = f"{INSTALL}: without one no reward can run the programs of a policy, all else works"
        return DoctorFinding(NAME, "warn", str(error).partition(": pip install")[0], advice)


async def _tried() -> DoctorFinding:
    async with Sandbox(small_limits("auto", at_once=4)) as opened:
        found = await run_suite(opened)
    escaped = [each for each in found if each.escaped]
    if escaped:
        said = "; ".join(f"{each.attempt.name} ({each.said.splitlines()[0]:.100})" for each in escaped[:5])
        advice = "do not run programs of a policy on this machine, and report this with the kernel's version"
        return DoctorFinding(NAME, "fail", f"{opened.level}: {len(escaped)} of {len(found)} escapes succeed: {said}", advice)
    advice = "" if opened.level == "bubblewrap" else f"bubblewrap would add namespaces: {INSTALL}"
    return DoctorFinding(
        NAME, "warn" if advice else "ok", f"{opened.level}: {len(found)} escapes tried, none succeeds", advice
    )
