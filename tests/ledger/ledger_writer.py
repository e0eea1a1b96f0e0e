"""A run in miniature for the kill tests: opens the ledger in argv[1], goes on where it stands, and never ends by itself.

Prints what it is about to do and, once the call has returned, that it is done, so that the parent knows what must be there.
"""

from __future__ import annotations

import random
import sys

from ledger_cases import group, task

from tidemill.ledger import SqliteLedger, has_ledger


def main(folder: str, seed: int) -> None:
    rng = random.Random(seed)
    ledger = SqliteLedger(folder, mode="open" if has_ledger(folder) else "create", segment_bytes=20_000)
    last = ledger.last_step()
    step = 0 if last is None else last + 1
    flying = [p.id for p in ledger.pending() if not p.finished]
    ready = [p.id for p in ledger.pending() if p.finished]
    following = ledger.next_group_id()  # asked once: what is read has to be written before
    while True:
        if len(flying) < 6:
            done("admit", group_id := following, lambda g=group_id: ledger.admit(g, task(g)))
            flying.append(group_id)
            following += 1
        group_id = flying.pop(rng.randrange(len(flying)))
        done("finish", group_id, lambda g=group_id: ledger.finish(group(g, samples=4, length=40)))
        if rng.random() < 0.2:
            done("drop", group_id, lambda g=group_id: ledger.drop(g, "zero_variance"))
        else:
            ready.append(group_id)
        if len(ready) >= 3:
            ids, ready = ready[:3], ready[3:]
            done("begin", step, lambda s=step, ids=ids: ledger.begin_step(s, 0, ids))
            done("end", step, lambda s=step: ledger.end_step(s, 0, {"reward/mean": 0.5}))
            step += 1


def done(what: str, number: int, call) -> None:
    print("doing", what, number, flush=True)
    call()
    print("done", what, number, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
