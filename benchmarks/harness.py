"""Several systems on the same work, in one invocation, in turns: each in a process of its own environment.

A system is a script of `systems/` that loads its model, says that it is ready, and then answers one request after another:
JSON lines on its standard input and on the descriptor that `REPLY` names, since libraries print on standard output. Only one
of them computes at a time.
"""

from __future__ import annotations

import json
import os
import platform
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PEERS = HERE.parent / ".peers"
RESULTS = HERE / "results"
REPLY = "BENCHMARK_REPLY"
START_S, ANSWER_S = 300.0, 1200.0
SETTLE_S = 3.0  # before a turn: vLLM's processes compute for a second after their answer (as long as a request of S takes)


class Missing(RuntimeError):
    """A peer's environment is not there."""


def python_of(peer: str) -> str:
    """The interpreter of a peer's environment; "" is our own."""
    if not peer:
        return sys.executable
    path = PEERS / peer / "bin" / "python"
    if not path.exists():
        raise Missing(f"{peer}: {path} is not there; `make peers` builds it")
    return str(path)


@dataclass
class System:
    """One process that does the work in one way. Use it as a context."""

    name: str
    script: str
    given: dict[str, Any]
    peer: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)  # what it says of itself when it is ready

    def __enter__(self) -> System:
        reading, writing = os.pipe()
        log = open(RESULTS.parent / f".{self.name}.log".replace(" ", "-"), "wb")
        self._process = subprocess.Popen(
            [python_of(self.peer), str(HERE / "systems" / self.script), json.dumps(self.given)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=[writing],
            env=os.environ | self.environment | {REPLY: str(writing)},
            start_new_session=True,
        )
        log.close()
        os.close(writing)
        self._replies, self._log = os.fdopen(reading), Path(log.name)
        try:
            self.about = self._answer(START_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer(ANSWER_S)

    def _answer(self, within_s: float) -> dict[str, Any]:
        """One line: nothing but the whole of it is ever written at once, and none before it was asked for."""
        there, _, _ = select.select([self._replies], [], [], within_s)
        line = self._replies.readline() if there else ""
        if not line:
            what = f"ended with status {self._process.wait(30)}" if there else f"did not answer within {within_s:g} s"
            raise RuntimeError(f"{self.name} {what}\n{self._log.read_text(errors='replace')[-3000:]}")
        return json.loads(line)

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait(20)
        self._replies.close()
        self._log.unlink(missing_ok=True)


def generators(
    model: Path, dtype: str, threads: int, *, context: int, sequences: int, most: int = 100, kv_mb: int | None = None
) -> list[System]:
    """Everything here that samples, at its best settings: on the same threads, `sequences` at a time. most: batches that
    transformers makes of a request. kv_mb: of our cache, else sized by what is free; vLLM touches its 4 GiB before."""
    base = {"model": str(model), "dtype": dtype, "threads": threads}
    common = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    vllm = {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    # Its default, blocks of 128 tokens, lets no sibling find a prompt of 64; of 32, 64 and 128 tokens 32 is quickest.
    sized = {"context": context, "sequences": sequences, "more": {"block_size": 32}}
    engine = {"engine": {"max_sequences": sequences, "context": context, "kv_memory_mb": kv_mb}}
    transformers = {"attention": "sdpa", "cache": "static", "batch": sequences, "most": most}
    return [
        System("tidemill", "generate_tidemill.py", base | engine, environment=common),
        System("vllm", "generate_vllm.py", base | sized, "vllm", common | vllm),
        System("transformers", "generate_transformers.py", base | transformers, environment=common),
    ]


def turns(systems: Sequence[System], number: int) -> Iterator[System]:
    """The systems for repetition `number`, each when the one before has come to rest. The order turns around each time."""
    for system in systems if number % 2 else list(reversed(systems)):
        time.sleep(SETTLE_S)
        yield system


def in_turns(systems: Sequence[System], requests: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The answers of each system by name; the first request warms up and is not kept."""
    answers: dict[str, list[dict[str, Any]]] = {system.name: [] for system in systems}
    for number, request in enumerate(requests):
        for system in turns(systems, number):
            answer = system.ask(**request)
            if number:
                answers[system.name].append(answer)
    return answers


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median over repetitions of what stood beside one another."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows with the same keys, as text."""
    cells = [[str(key) for key in rows[0]], *([_shown(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)


def _shown(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"


def save(name: str, found: Any, systems: dict[str, Any]) -> Path:
    """The figures with the machine, the date, the commit and what was asked for, in `results/NAME.json`."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    about = {"date": date.today().isoformat(), "commit": commit(), "asked": sys.argv[1:], "machine": machine()}
    about |= {"python": platform.python_version(), "systems": systems}
    path.write_text(json.dumps(about | {"figures": found}, indent=1) + "\n")
    return path


def commit() -> str:
    """Of the working tree that is measured; with a "+" where it differs from it. "" outside of a repository."""
    said = subprocess.run(["git", "describe", "--always", "--dirty=+"], cwd=HERE, capture_output=True, text=True)
    return said.stdout.strip()


def machine() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{model}, {os.cpu_count()} cores"


def wait_until_quiet(limit_s: float = 60.0) -> None:
    """Until the machine's load says that nothing else runs, or the time is over: then it is said."""
    end = time.monotonic() + limit_s
    while os.getloadavg()[0] > 0.5:
        if time.monotonic() > end:
            print(f"beware: the load is {os.getloadavg()[0]:.1f}; something else runs beside this", file=sys.stderr)
            return
        time.sleep(1)
