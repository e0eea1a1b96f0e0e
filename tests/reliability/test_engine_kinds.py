"""An engine of each kind is added, drained, frozen and killed while a run goes on: nothing lost, nothing trained twice."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
from runs import GoesOn, Run

from tidemill.cli.commands import pool
from tidemill.core.errors import ConfigError
from tidemill.engine.remote.server_command import find_python
from tidemill.engine.vllm.vllm_settings import BUILD, ENVIRONMENT, VllmSettings

ROOT = Path(__file__).parents[2]
HOW = ("supervise.resume=true", "supervise.restarts=1000", "supervise.backoff_s=0.05")
KINDS = {
    "native": ("record.probe_every=1",),
    "transformers": ("record.probe_every=1", "engine.max_sequences=16"),
    "vllm": ("engine.kv_memory_mb=32", "engine.max_sequences=16"),
    "sglang": (
        "record.probe_every=1",
        "engine.kv_memory_mb=32",
        "engine.max_sequences=16",
        f"engine.python={sys.executable}",
    ),
}
SERVERS = {"vllm.entrypoints.openai.api_server", "sglang.launch_server"}
STAND_IN = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "engine" / "sglang" / "standin")]  # for SGLang's server


def server_of(role: int) -> int:
    """The process that does an engine's work: its server's, where it has one, else its own."""
    for each in psutil.Process(role).children(recursive=True):
        if not each.name().startswith("tidemill") and {*each.cmdline()} & SERVERS:
            return each.pid
    return role


def hit(run: Run, process: GoesOn, name: str, how: signal.Signals) -> None:
    """End or freeze what does an engine's work. The run goes on with a process of its own for the same engine."""
    before = run.processes()[name]
    os.kill(server_of(before), how)
    run.goes_on(process, steps=3, limit_s=400)
    assert run.processes()[name] != before


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("native", marks=pytest.mark.slow),
        pytest.param("transformers", marks=pytest.mark.slow),
        pytest.param("vllm", marks=pytest.mark.vllm),
        pytest.param("sglang", marks=pytest.mark.slow),
    ],
)
def test_an_engine_is_added_drained_frozen_and_killed(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "vllm":
        try:
            find_python(VllmSettings(), ENVIRONMENT, BUILD)
        except ConfigError as error:
            pytest.skip(str(error))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "vllm_plugin")]))
    if kind == "sglang":
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(STAND_IN))
    stuck_s = 60 if kind == "vllm" else 15  # a server that starts beside it takes all cores
    more = (f"engine.kind={kind}", f"supervise.stuck_s={stuck_s}", *HOW, *KINDS[kind])
    run = Run(tmp_path, steps=100_000, zero_variance="keep", lr=1e-6, max_lag=2, overrides=more)
    with run.going_on() as process:
        run.goes_on(process, limit_s=400)
        assert pool.add(run.folder, as_json=False) == 0
        run.comes_to(process, lambda: set(run.processes()) == {"trainer", "engine-0", "engine-1"})
        assert pool.remove(run.folder, "engine-0", hand_over=False, as_json=False) == 0
        run.comes_to(process, lambda: set(run.processes()) == {"trainer", "engine-1"})
        run.goes_on(process)
        hit(run, process, "engine-1", signal.SIGKILL)
        hit(run, process, "engine-1", signal.SIGSTOP)
    run.check(complete=False)
    assert (gaps := run.gaps()) and max(gaps) < 1e-5, gaps
