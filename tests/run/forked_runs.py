"""`tidemill train` in processes forked from one that has imported everything: half a second each, and killed like any other.

runs = Runs()
runs.train(recipe, "steps=4", faults="trainer:save:2:kill") -> Ended(status, output, faults that happened)
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 100


@dataclass(frozen=True)
class Ended:
    status: int  # negative: the signal it died of
    output: str
    happened: list[str]


class Runs:
    def __init__(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def train(self, recipe: Path, *overrides: str, faults: str = "") -> Ended:
        """One run to its end, whatever that is. Faults of earlier runs of this recipe's folder are over."""
        log, output = recipe.with_suffix(".faults"), recipe.with_suffix(".out")
        before = log.read_text().split() if log.exists() else []
        arguments = ["train", str(recipe), *overrides, "--json"]
        job = {"arguments": arguments, "faults": faults, "log": str(log), "out": str(output)}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())
        happened = log.read_text().split() if log.exists() else []
        return Ended(status, output.read_text(), happened[len(before) :])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(LIMIT_S) == 0


def serve() -> None:
    from tidemill.cli import main as cli
    from tidemill.cli.commands import training
    from tidemill.core import fault_injection as faults
    from tidemill.engine.native import native_engine
    from tidemill.models.hf_weights import load_folder
    from tidemill.models.new_model import SIZES, fresh_model
    from tidemill.run.storage.model_folder import ALPHABET, ModelFolder
    from tidemill.trainer import native_trainer

    assert training and native_engine and native_trainer
    with tempfile.TemporaryDirectory() as folder:  # what torch and transformers import at their first use
        fresh_model(Path(folder) / "m", alphabet=ALPHABET, **SIZES["0.1m"])
        ModelFolder.open(Path(folder) / "m")
        load_folder(Path(folder) / "m")
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            signal.alarm(LIMIT_S)  # a run that hangs ends by SIGALRM
            descriptor = os.open(job["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            os.environ[faults.VARIABLE], os.environ[faults.LOG_VARIABLE] = job["faults"], job["log"]
            faults._armed = faults.Faults.from_environment(os.environ)
            sys.argv = ["tidemill", *job["arguments"]]
            os._exit(_status(cli.main))
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _status(main) -> int:
    try:
        main()
        return 0
    except SystemExit as left:
        return int(left.code or 0)
    except BaseException:
        traceback.print_exc()
        return 70
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    serve()
