"""What benchmarks compute from their measurements: a figure is worth as much as this."""

from __future__ import annotations

import importlib
import runpy
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tidemill.models.architecture import Architecture
from tidemill.models.decoder import Decoder

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("harness")


@pytest.fixture
def script(harness: Any) -> Any:
    return lambda name: runpy.run_path(str(FOLDER / f"{name}.py"))


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_each_begins(name: str, script: Any) -> None:
    pytest.importorskip("matplotlib")
    assert script(name)["__doc__"], "what it measures, and how to call it"


def test_ratios_are_of_what_stood_beside_one_another(harness: Any) -> None:
    assert harness.ratio([10, 100, 30], [1, 50, 10]) == 3
    assert harness.spread([3, 1, 2]) == {"median": 2, "least": 1, "most": 3}


@dataclass
class Asked:
    name: str
    log: list[tuple[str, int]]
    answers: list[int] = field(default_factory=list)

    def ask(self, number: int) -> dict[str, Any]:
        self.log.append((self.name, number))
        return {"number": number}


def test_systems_take_turns_and_the_first_request_warms_them_up(harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "SETTLE_S", 0.0)
    log: list[tuple[str, int]] = []
    found = harness.in_turns([Asked("a", log), Asked("b", log)], [{"number": i} for i in range(3)])
    assert [name for name, _ in log] == ["b", "a", "a", "b", "b", "a"], "whoever came last comes first"
    assert found == {name: [{"number": 1}, {"number": 2}] for name in "ab"}


def test_list_scheduling(script: Any) -> None:
    schedule = script("longtail")["list_schedule"]
    steps = lambda jobs, slots: schedule([[job] for job in jobs], slots).makespan  # noqa: E731
    assert steps([3, 3, 3, 1], 2) == 6 and steps([5, 1, 1, 1], 2) == 5 and steps([2] * 8, 8) == 2


def test_a_run_arrives_when_its_smoothed_accuracy_does(script: Any) -> None:
    arrival = script("time_to_reward")["arrival"]
    peaks = [(0.0, 0.5), (1.0, 0.9), (2.0, 0.7), (3.0, 0.9), (4.0, 0.95), (5.0, 0.95)]
    assert arrival(peaks) == (4.0, pytest.approx(2.8 / 3)), "one look above the goal is no arrival"
    assert arrival(peaks[:4])[0] is None


def test_memory_is_the_peak_over_all_that_a_process_started(script: Any) -> None:
    """A child of the process takes what is to be seen, and gives it back."""
    held = "import sys; x = bytearray(96 << 20); print(flush=True); sys.stdin.readline()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {held!r}]); sys.stdin.readline()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdout.readline()
            with script("step")["Memory"](process.pid) as memory:
                end = time.monotonic() + 30
                while memory.peak < 96 << 20 and time.monotonic() < end:
                    time.sleep(0.01)
        finally:
            process.stdin.close()
    assert 96 << 20 <= memory.peak < 160 << 20


def test_a_decode_step_reads_matrices_once_and_what_its_rows_see(script: Any) -> None:
    shape = script("on_cuda")["description"]("0.6B", 64) | {"vocab_size": 23, "hidden_size": 16, "intermediate_size": 24}
    shape |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    arch = Architecture.from_dict(shape)
    model = Decoder(arch).to(torch.bfloat16)
    norms = 2 * (2 * arch.hidden + 2 * arch.head_dim)
    layers = 2 * arch.hidden * ((arch.heads + 2 * arch.kv_heads) * arch.head_dim + arch.heads * arch.head_dim) + norms
    layers += 2 * 3 * arch.hidden * arch.intermediate
    seen = 5 * 7 * 2 * arch.kv_heads * 2 * arch.head_dim  # five rows that see seven tokens each, in two layers
    expected = 2 * (layers + arch.vocab * arch.hidden + 5 * arch.hidden + seen)
    assert script("on_cuda")["step_bytes"](model, 5, 7) == expected
