"""A full GRPO step: Tidemill beside TRL's `GRPOTrainer`, on the same weights, prompts and reward, in turns.

    python benchmarks/step.py [--sizes S M] [--dtypes float32 bfloat16] [--repeats 3] [--steps 3] [--device cpu]
                              [--engines native vllm] [--lora RANK]

16 prompts x 8 samples a step, 64 + 128 tokens, no reply ends early. Tokens are sampled ones, per second of a whole step;
memory is the peak over all processes of what is theirs (PSS). TRL takes a step in micro-batches of 32 rows and in one of all
128, each a row of its own: which is quicker differs from run to run; all 128 take more than twice the memory. In bfloat16
with weights of float32, as ours are, and with weights of bfloat16, whose small updates are lost, but for which alone its
generation may use a static cache there. With `--lora`, both train an adapter of that rank on every matrix of the layers, TRL
through PEFT. TRL needs `make peers`. Prints tables of rates and of the seconds of each phase, and writes
`results/step.json`, or `results/step_lora.json`. Phases of ours overlap: engines sample while the trainer works.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import torch
from harness import System, ratio, save, spread, table, turns, wait_until_quiet
from systems.step_task import alphabet
from workloads import SIZES, VOCAB

from tidemill.models.new_model import fresh_model

GROUPS, SAMPLES, PROMPT, TOKENS = 16, 8, 64, 128
SPECIAL = 3  # tokens of a vocabulary that are no characters
MICRO_BATCH = {"S": 1152}  # tokens: two of half a group; else two of a group
TARGET, TARGET_MEMORY = 3.5, 0.6
TARGET_LORA, TARGET_MEMORY_LORA = 2.5, 0.7
KV_MB = 512  # of vLLM's cache: room for all sequences of a step
SAMPLED_S = 0.25  # between two questions for what is resident
MORE, LOOK_S = 1.002, 3.0  # so much more than before is worth a look, or so much time


class Memory:
    """The greatest sum of PSS over a process and all that it started, while the context is open.

    A look walks page tables for 50 ms, so one is taken where more is resident, which the system counts anyway, than at any
    look before, and now and then. A page that processes share passes to those that are left where one ends, and would be
    counted twice by a look that takes a while: each is looked at twice, in turn and back, and the smaller number is taken.
    """

    def __init__(self, pid: int) -> None:
        self.peak, self._over, self._root = 0, threading.Event(), psutil.Process(pid)

    def __enter__(self) -> Memory:
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        with suppress(psutil.NoSuchProcess):  # it has ended: whoever waits for its answer is told
            most, due = 0, 0.0
            while not self._over.wait(SAMPLED_S):
                every = [self._root, *self._root.children(recursive=True)]
                if (resident := sum(map(_resident, every))) < MORE * most and time.monotonic() < due:
                    continue
                most, due = max(most, resident), time.monotonic() + LOOK_S
                once = [_pss(process) for process in every]
                twice = [_pss(process) for process in reversed(every)]
                self.peak = max(self.peak, sum(map(min, once, reversed(twice))))

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def _resident(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.NoSuchProcess:
        return 0


def _pss(process: psutil.Process) -> int:
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return 0


def _ours(kind: str) -> str:
    return "tidemill" if kind == "native" else f"tidemill, {kind}"


def make_model(folder: Path, size: str) -> None:
    fresh_model(folder, alphabet=alphabet(VOCAB[size] - SPECIAL), context=512, **SIZES[size])
    for name in ("config.json", "generation_config.json"):  # nothing ends a reply before its length
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": None}))


def systems_for(model: Path, size: str, dtype: str, args: argparse.Namespace) -> list[System]:
    work = {"model": str(model), "dtype": dtype, "groups": GROUPS, "samples": SAMPLES, "tokens": TOKENS}
    work |= {"prompt": PROMPT, "characters": VOCAB[size] - SPECIAL, "device": args.device, "lora": args.lora}
    shared = {"HF_HUB_OFFLINE": "1"}
    theirs = shared | {"OMP_NUM_THREADS": str(args.threads)}
    of_trl: dict[str, dict[str, Any]] = {}
    for parts, weights in product(args.accumulate, args.weights):
        if weights not in ("float32", dtype):
            continue
        name = f"trl, {GROUPS * SAMPLES // parts} rows" + (f", {weights} weights" if weights != "float32" else "")
        cache = "static" if weights == dtype else None
        of_trl[name] = work | {"threads": args.threads, "accumulate": parts, "weights": weights, "cache": cache}
    ours = {"max_lag": args.max_lag, "engine_threads": args.engine_threads, "trainer_threads": args.trainer_threads}
    ours["stream"] = args.stream
    ours["micro_batch"] = args.micro_batch or (8192 if args.device == "cuda" else MICRO_BATCH.get(size, 2176))
    engines: dict[str, dict[str, Any]] = {"native": {}, "vllm": {"kind": "vllm", "kv_memory_mb": KV_MB}}
    return [
        *(
            System(_ours(kind), "step_tidemill.py", work | ours | {"engine": engines[kind]}, environment=shared)
            for kind in args.engines
        ),
        *(System(name, "step_trl.py", given, "trl", theirs) for name, given in of_trl.items()),
    ]


def measure(size: str, dtype: str, args: argparse.Namespace, about: dict[str, Any]) -> list[dict[str, Any]]:
    answers: dict[str, list[dict[str, Any]]] = {}
    peaks: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        make_model(Path(place) / "model", size)
        every = systems_for(Path(place) / "model", size, dtype, args)
        systems = [system for system in every if system.name.partition(",")[0] not in args.without]
        for system in systems:
            stack.enter_context(system)
            about[f"{system.name} {dtype}"] = system.about | system.given
        wait_until_quiet()
        for number in range(args.repeats + 1):
            for system in turns(systems, number):
                with Memory(system.pid) as memory:
                    answer = system.ask(steps=args.steps if number else 1)
                peaks[system.name] = max(peaks.get(system.name, 0), memory.peak)
                print(
                    f"{system.name}: {answer['tokens'] / answer['seconds']:,.0f} tok/s, {memory.peak / 1e6:,.0f} MB",
                    flush=True,
                )
                if number:
                    answers.setdefault(system.name, []).append(answer)
    speeds = {name: [each["tokens"] / each["seconds"] for each in found] for name, found in answers.items()}
    target, at_most = (TARGET_LORA, TARGET_MEMORY_LORA) if args.lora else (TARGET, TARGET_MEMORY)
    rows = []
    for name, values in speeds.items():
        row: dict[str, Any] = {"model": size, "dtype": dtype, "system": name}
        row |= {f"tok/s {key}": value for key, value in spread(values).items()}
        row |= {"we are x": ratio(speeds["tidemill"], values), "target": target if name.startswith("trl") else ""}
        row |= {"peak MB": peaks[name] / 1e6, "we take x": peaks["tidemill"] / peaks[name]}
        rows.append(row | {"at most": at_most if name.startswith("trl") else ""})
    print(table(rows), flush=True)
    print(table([{"model": size, "dtype": dtype} | each for each in _phases(answers)]), flush=True)
    return rows


def _phases(answers: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The median seconds of a step in each phase."""
    every = dict.fromkeys(phase for found in answers.values() for phase in found[0]["phases"])
    return [
        {"system": name}
        | {f"{phase} s": statistics.median(each["phases"].get(phase, 0.0) for each in found) for phase in every}
        for name, found in answers.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", nargs="+", default=["S", "M"], choices=SIZES)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of TRL")
    parser.add_argument("--accumulate", type=int, nargs="+", default=[4, 1], help="micro-batches of TRL's step, a row each")
    dtypes = ["float32", "bfloat16"]
    parser.add_argument("--weights", nargs="+", default=dtypes, choices=dtypes, help="of TRL, in bfloat16")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--max-lag", type=int, default=1)
    parser.add_argument("--engine-threads", type=int, default=torch.get_num_threads(), help="at most: they share the cores")
    parser.add_argument("--trainer-threads", type=int, default=torch.get_num_threads(), help="at most")
    parser.add_argument("--stream", action="store_true", help="ours begins a step with the groups that have finished")
    parser.add_argument(
        "--micro-batch", type=int, help="tokens of ours that run at a time; by default 2,176, of S 1,152, on a GPU 8,192"
    )
    parser.add_argument("--lora", type=int, default=0, help="rank of the adapter that is trained; 0: all weights are")
    parser.add_argument("--engines", nargs="+", default=["native"], choices=["native", "vllm"], help="of ours")
    parser.add_argument("--without", nargs="+", default=[], choices=["trl"])
    args = parser.parse_args()
    about: dict[str, Any] = {}
    rows = [row for size in args.sizes for dtype in args.dtypes for row in measure(size, dtype, args, about)]
    print()
    print(table(rows))
    print(f"written to {save('step_lora' if args.lora else 'step', rows, about)}")


if __name__ == "__main__":
    main()
