"""The demo learns with two replicas that send their gradients in few bits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("kind", ["int8", "bfloat16"])
def test_the_demo_learns(kind: str, seed: int, tmp_path: Path):
    given = (
        "trainer.ranks=2",
        "trainer.shard=none",
        f"trainer.reduce={kind}",
        f"seed={seed}",
        f"run_dir={tmp_path / 'run'}",
    )
    command = [sys.executable, "-m", "tidemill.cli", "train", "recipes/demo.toml", *given, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=True)
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["accuracy_after"] > report["accuracy_before"] + 0.1, report
