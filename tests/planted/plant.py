"""Plant the faults of `faults.py`, and of the lists beside it, one at a time and say which of them the tests notice.

    python tests/planted/plant.py [--only WORDS] [--jobs 2]

Each fault is planted in a copy of the repository, and only the tests that it names are run there. Status 1 when one is not
noticed. All of them take a while: `--only` chooses some by their names.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
from evaluation_faults import EVALUATION_FAULTS
from faults import FAULTS, Fault
from gateway_faults import GATEWAY_FAULTS
from grammar_faults import GRAMMAR_FAULTS
from load_faults import LOAD_FAULTS
from parts_faults import PARTS_FAULTS
from policy_faults import POLICY_FAULTS
from sandbox_faults import SANDBOX_FAULTS
from several_policies_faults import SEVERAL_POLICIES_FAULTS
from side_faults import SIDE_FAULTS
from speculation_faults import SPECULATION_FAULTS
from tools_faults import TOOLS_FAULTS
from tree_faults import TREE_FAULTS
from weight_sync_faults import WEIGHT_SYNC_FAULTS

ROOT = Path(__file__).resolve().parents[2]
EVERY = [
    *EVALUATION_FAULTS,
    *GATEWAY_FAULTS,
    *FAULTS,
    *GRAMMAR_FAULTS,
    *LOAD_FAULTS,
    *PARTS_FAULTS,
    *POLICY_FAULTS,
    *SANDBOX_FAULTS,
    *SEVERAL_POLICIES_FAULTS,
    *SIDE_FAULTS,
    *SPECULATION_FAULTS,
    *TOOLS_FAULTS,
    *TREE_FAULTS,
    *WEIGHT_SYNC_FAULTS,
]
LIMIT_S = 600.0  # of one fault's tests
COPIED = ("tidemill", "vllm_plugin", "tests", "recipes", "docs", "benchmarks", "pyproject.toml", "README.md")
FAILED = 1  # pytest's status when tests ran and some failed; any other says that the fault was not tried


def source_of(fault: Fault, package: Path) -> Path:
    """The module that holds the fault's line. Raises ValueError unless it occurs exactly once."""
    found = [(path, path.read_text().count(fault.right)) for path in package.rglob("*.py")]
    places = [path for path, count in found if count]
    if sum(count for _, count in found) != 1:
        raise ValueError(f"{fault.name}: its line occurs {sum(count for _, count in found)} times: expected once")
    return places[0]


def noticed(fault: Fault, copy: Path) -> tuple[bool, str]:
    """Whether the fault's tests fail with it, and the last line that they said."""
    source = source_of(fault, copy / "tidemill")
    text = source.read_text()
    source.write_text(text.replace(fault.right, fault.wrong))
    try:
        paths = [f"tests/{each}" for each in fault.tests.split()]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *paths]
        environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return False, f"its tests hung for {LIMIT_S:g} s"
    finally:
        source.write_text(text)
        end_left(copy)
    told = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return done.returncode == FAILED, (told or done.stdout.splitlines() or [done.stderr])[-1][:150]


def end_left(copy: Path) -> None:
    """Kill the processes that the fault let live on: they still have the copy as their working folder."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cwd() == str(copy):
                process.kill()


def work(left: queue.SimpleQueue[Fault], missed: list[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="planted-") as place:
        for name in COPIED:
            here, there = ROOT / name, Path(place) / name
            shutil.copytree(here, there, ignore=shutil.ignore_patterns("__pycache__")) if here.is_dir() else shutil.copy(
                here, there
            )
        while True:
            try:
                fault = left.get_nowait()
            except queue.Empty:
                return
            begun = time.monotonic()
            caught, said = noticed(fault, Path(place))
            if not caught:
                missed.append(fault.name)
            print(f"{'caught' if caught else 'MISSED'}  {time.monotonic() - begun:5.0f} s  {fault.name}: {said}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="plant those faults whose name holds these words")
    parser.add_argument("--jobs", type=int, default=2, help="faults that are tried at a time")
    given = parser.parse_args()
    chosen = [fault for fault in EVERY if given.only in fault.name]
    left: queue.SimpleQueue[Fault] = queue.SimpleQueue()
    for fault in chosen:
        left.put(fault)
    missed = list[str]()
    threads = [threading.Thread(target=work, args=(left, missed)) for _ in range(min(given.jobs, len(chosen)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"{len(chosen) - len(missed)} of {len(chosen)} planted faults were caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
