"""What the process that roles are forked from has imported, and how those roles then compute."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tidemill.models.new_model import SIZES, fresh_model
from tidemill.runtime.fork_client import server_environment

SCRIPT = """
import asyncio, json, sys, threading
from pathlib import Path
from tidemill.run.roles import build_role, import_roles, one_thread, use_threads
from tidemill.runtime.fork_server import thread_count
import_roles()
before, threads = set(sys.modules), thread_count()
import numpy as np, torch
from tidemill.core.types import LossSpec, Sample
use_threads(3)
model = {"model": sys.argv[1]}
sampled = np.arange(6) > 1
sample = Sample(
    tokens=np.arange(6, dtype=np.int32), mask=sampled, logprobs=np.full(6, -1, np.float32), loss="l",
    versions=np.zeros(6, np.int32), advantages=np.ones(6, np.float32), weights=sampled.astype(np.float32),
)
async def main():
    engine, _ = build_role(model | {"role": "engine", "name": "engine-0", "engine": {}, "transport": "shared_memory"})
    more = {"role": "trainer", "name": "trainer", "trainer": {}, "steps": 1, "sync": {}, "folder": sys.argv[1]}
    trainer, _ = build_role(model | more, offload=True)
    await trainer.forward_backward([sample], {"l": LossSpec("ppo_clip", {"clip_low": 0.2, "clip_high": 0.2})})
    await trainer.apply(1.0)
    await engine.close()
    return await one_thread()(torch.get_num_threads)
used = asyncio.run(main())
compiler = "torch._dynamo" in sys.modules
print(json.dumps({"threads": threads, "used": used, "new": sorted(set(sys.modules) - before), "compiler": compiler}))
"""


@pytest.mark.runs
def test_roles_find_their_imports_done_and_no_thread_begun(tmp_path: Path) -> None:
    fresh_model(tmp_path / "model", alphabet="abcdefgh", **SIZES["0.1m"])
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "model")]
    environment = server_environment()
    environment.pop("OMP_NUM_THREADS", None)  # which would hide a pool of threads that it does not forbid
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(done.stdout)
    assert found["threads"] == 1  # or nothing could be forked
    assert found["used"] == 3  # in the thread that computes, too
    assert not found["compiler"], "nothing here uses it, and its import takes as long as that of torch"
    assert len(found["new"]) < 5, "import these in build.import_roles: every start of a role pays for them"
