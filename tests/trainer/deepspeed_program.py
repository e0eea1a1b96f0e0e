"""Program of one rank for `test_deepspeed.py`: a trainer on DeepSpeed does what the cases on stdin say, with other ranks.

python deepspeed_program.py MEETING RANK SIZE      cases as JSON lines on stdin, for each a JSON line with the answers
"""

import asyncio
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from deepspeed_cases import dealt_rows, losses_of, trainer_on
from trainer_cases import CPU

from tidemill.core.types import Version
from tidemill.trainer.deepspeed_engine import DeepSpeedRanks
from tidemill.trainer.ranks import Ranks
from tidemill.trainer.trainer_kinds import DeepSpeedSettings


async def act(case, rank, size, meeting):
    """The answers of one rank's trainer to what it is told to do, in turn."""
    settings = DeepSpeedSettings(ranks=size, device="cpu", **case["settings"])
    ranks = DeepSpeedRanks(rank, settings, CPU, meeting)
    folder = case.get("folder") and f"{case['folder']}/rank-{rank}"
    trainer = trainer_on(settings, {**case, "folder": folder}, ranks, ranks.optimizer)
    answers = []
    for verb, what in case["do"]:
        if verb == "rows":
            result = await trainer.forward_backward(dealt_rows(what, size)[rank], losses_of(case))
            answers.append({"tokens": result.metrics["tokens"]})
        elif verb == "apply":
            answers.append(await trainer.apply(what))
        elif verb == "save":
            await trainer.snapshot()
            await trainer.save(what)
        elif verb == "load":
            await trainer.load(what)
        elif verb == "publish":
            update = await trainer.publish(Version(what))
            answers.append({"fingerprint": update.version.fingerprint, "bytes": update.bytes})
    trainer._ranks = Ranks()  # the next case's trainer meets the others, too
    await trainer.close()
    return answers


def main():
    torch.set_num_threads(1)
    meeting, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    for line in sys.stdin:
        print(json.dumps(asyncio.run(act(json.loads(line), rank, size, meeting))), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
