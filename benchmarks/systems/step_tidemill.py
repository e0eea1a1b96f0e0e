"""GRPO steps with Tidemill, in its own processes. See `harness.py`. A request is a number of optimizer steps.

A run is started for each request. What starts it, fills its pipeline and drains it does not count: beside every step that
does, as much is generated as in the middle of a long run.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import tempfile
import time
from pathlib import Path

from serve import given, serve

import tidemill

PHASES = {
    "sampling": "generate",
    "training": "trainer/train",
    "publishing": "trainer/sync",
}  # shares of a step, which overlap
PHASES |= {"waiting for rollouts": "trainer/wait for rollouts"}
FILLING = 3  # steps at the beginning of a run that are not counted, at least
wanted = given()
os.environ["STEP_TASK"] = json.dumps({"characters": wanted["characters"], "prompt": wanted["prompt"]})


def answer(steps: int) -> dict:
    ends: list[float] = []
    spent: list[dict[str, float]] = []

    def ended(step: int, metrics: dict[str, float]) -> None:
        if "lag/mean" in metrics:
            ends.append(time.perf_counter())
            spent.append({phase: metrics.get(f"time/{key}", 0.0) * metrics["time/step_s"] for phase, key in PHASES.items()})

    first = max(FILLING, wanted["max_lag"] + 1)
    with tempfile.TemporaryDirectory() as place:
        tidemill.train(
            f"{Path(__file__).with_name('step_task.py')}:score",
            wanted["model"],
            run_dir=Path(place) / "run",
            callbacks=[ended],
            quiet=True,
            steps=first + steps + wanted["max_lag"] + 1,  # the last batch is admitted so many steps before the end
            max_lag=wanted["max_lag"],
            rollout={"groups": wanted["groups"], "group_size": wanted["samples"], "max_tokens": wanted["tokens"]},
            trainer={
                **{"lr": 1e-5, "dtype": wanted["dtype"], "serving_dtype": wanted["dtype"], "device": wanted["device"]},
                "micro_batch_tokens": wanted["micro_batch"],
                "lora": {"rank": wanted["lora"], "alpha": 2.0 * wanted["lora"]} if wanted["lora"] else None,
            },
            engine={"dtype": wanted["dtype"], "device": wanted["device"], **wanted["engine"]},
            placement={name: wanted[name] for name in ("engine_threads", "trainer_threads", "stream")},
            algorithm={"name": "grpo", "zero_variance": "keep"},
            eval={"every": 0, "tasks": 1, "final_tasks": 1},
            record={"checkpoint_every": 0, "probe_every": 0, "trace": False},
        )
    tokens = steps * wanted["groups"] * wanted["samples"] * wanted["tokens"]
    counted = spent[first : first + steps]
    phases = {phase: sum(each[phase] for each in counted) / steps for phase in PHASES}
    return {"seconds": ends[first + steps - 1] - ends[first - 1], "tokens": tokens, "phases": phases}


serve({"tidemill": importlib.metadata.version("tidemill"), "torch": importlib.metadata.version("torch")}, answer)
