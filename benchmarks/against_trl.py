"""TRL's own code and Tidemill's functions on the same tensors: values, and gradients by each token's logprob.

    python benchmarks/against_trl.py [--seed 0] [--only WORD]

Where both have a loss, an advantage or a correction, they agree when TRL's constants are set (the column says which), or the
row says why they differ; then what it says is accounted for, and they agree. Anything else ends this with status 1, and so
does an explanation of a difference that is not there. Differences are of the largest magnitude in TRL's array; what TRL
(or a step of ours) keeps in float32 may differ by 1e-5, everything else by 1e-6. Prints a table and writes
`results/against_trl.json`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from definition_rows import ONLY_TRL, SIZE, Row, rows
from definitions import Found, Given
from harness import System, save, table

from tidemill.core.types import Array

GROUPS, WIDTH, PAIRS = 16, 12, 6


def drawn(seed: int) -> dict[str, Array]:
    """Numbers that float32 holds exactly: nobody rounds what is given."""
    rng, n = np.random.default_rng(seed), GROUPS * SIZE

    def noisy(values: Array, spread: float) -> Array:
        return np.minimum(values + rng.normal(0, spread, values.shape), -1e-3).astype(np.float32).astype(np.float64)

    t: dict[str, Array] = {"groups": np.repeat(np.arange(1, GROUPS + 1), SIZE), "ones": np.ones(n, np.int64)}
    t["lengths"] = np.append(rng.integers(1, WIDTH + 1, n - 1), WIDTH)
    t["old"] = noisy(-rng.exponential(1.0, (n, WIDTH)) - 0.3, 0)
    t["live"], t["ref"], t["mu"] = (noisy(t["old"], spread) for spread in (0.4, 0.5, 0.4))
    t["mu"][:, 1::3] = t["old"][:, 1::3]  # k = 1
    t["gone"] = noisy(t["old"] - 0.5, 0.4)
    t["far"] = np.where(rng.random((n, WIDTH)) < 0.1, t["old"] - 25, t["old"])
    t["entropy"] = rng.uniform(0.1, 3.0, (n, WIDTH))
    t["tools"] = (rng.random((n, WIDTH)) < 0.7).astype(np.int64)
    t["tools"][:, 0] = 1
    t["truncated"] = np.arange(n) % 5 == 3
    t["rewards"] = rng.choice([0.0, 0.25, 0.5, 1.0], n)
    t["rewards"][:2], t["rewards"][SIZE : 2 * SIZE] = (0.0, 1.0), 0.5  # one group that differs, and one that does not
    t["parts"] = np.stack([rng.integers(0, 2, n), rng.integers(0, 65, n) / 64, 10.0 * rng.integers(0, 3, n)], 1)
    t["some"] = np.where(np.arange(n) % 7 == 3, np.nan, t["rewards"])  # attempts that nobody could score

    t["pair_lengths"] = rng.integers(1, WIDTH + 1, 2 * PAIRS)
    t["pair_even"] = np.append(np.full(PAIRS, 5), t["pair_lengths"][PAIRS:])
    t["pair_live"] = noisy(-rng.exponential(1.0, (2 * PAIRS, WIDTH)) - 0.3, 0)
    t["pair_ref"] = noisy(t["pair_live"], 0.5)
    t["up"], t["down"] = t["pair_live"] + 0.25, t["pair_live"] - 0.25
    t["pair_rewards"] = rng.permutation(2 * PAIRS).astype(np.float64)
    t["desirable"] = np.arange(2 * PAIRS) % 3 > 0
    t["pair_ids"] = rng.integers(0, 16, (2 * PAIRS, WIDTH + 3))
    t["logits"] = rng.normal(0, 2, (2 * PAIRS, WIDTH + 3, 16))
    t["scores"], t["margin"] = rng.normal(0, 1, 2 * PAIRS), rng.uniform(0, 1, PAIRS)
    return t


def furthest(theirs: Found, mine: Found) -> dict[str, float]:
    """The largest difference of values and of gradients, over the largest magnitude in TRL's array."""
    found: dict[str, float] = {}
    assert "gradient" in mine, sorted(mine)
    for name, value in ((name, value) for name, value in mine.items() if name in theirs):
        kind = "gradient" if name.endswith("gradient") else "value"
        assert value.shape == theirs[name].shape and np.isfinite(value).all(), name
        size = float(np.abs(theirs[name]).max()) or 1.0
        found[kind] = max(found.get(kind, 0.0), float(np.abs(value - theirs[name]).max()) / size)
    return found


def judged(row: Row, t: dict[str, Array], theirs: Sequence[Found]) -> dict[str, Any]:
    g = Given(t, row.fed)
    first = furthest(theirs[0], row.mine(t, g))
    called = ", ".join(f"{name}={value}" for name, value in row.settings.items())
    found: dict[str, Any] = {"what": row.what, "trl": f"{row.trainer}({called})", "tidemill": row.ours, **first}
    found |= {"tolerance": row.tolerance, "set equal": row.equal, "why": row.why}
    good = max(first.values()) <= row.tolerance
    if not row.why:
        return found | {"agrees": "yes" if good else "NO"}
    second = furthest(theirs[1], (row.accounted or row.mine)(t, g))
    fine = not good and max(second.values()) <= row.tolerance
    return found | {"accounted": second, "agrees": "explained" if fine else "NO"}


def shown(row: Row, found: dict[str, Any], number: int) -> dict[str, Any]:
    named = {name: value for name, value in row.settings.items() if isinstance(value, str)}
    cells = {"what": row.what, "TRL": " ".join([row.trainer, *named.values()]), "Tidemill": row.ours}
    cells |= {name: f"{found[name]:.0e}" if name in found else "-" for name in ("value", "gradient")}
    return cells | {"agrees": found["agrees"] + (f" ({number})" if number else ""), "set equal": row.equal}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="rows whose first column has this word")
    args = parser.parse_args()
    torch.set_num_threads(1)
    wanted, t = [row for row in rows() if args.only in row.what], drawn(args.seed)
    cases = [case for row in wanted for case in row.cases()]
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as place:
        np.savez(Path(place) / "given.npz", **t)
        with System("trl definitions", "trl_definitions.py", {"threads": 1}, "trl", environment) as system:
            system.ask(folder=place, cases=cases)
            about = {"trl": system.about}
        with np.load(Path(place) / "found.npz") as file:
            theirs: list[Found] = [{} for _ in cases]
            for key in file.files:
                number, _, name = key.partition("/")
                theirs[int(number)][name] = file[key]
    answers = iter(theirs)
    found = [judged(row, t, [next(answers) for _ in row.cases()]) for row in wanted]
    whys = list(dict.fromkeys(row.why for row in wanted if row.why))
    numbers = [whys.index(row.why) + 1 if row.why else 0 for row in wanted]
    print(table([shown(*each) for each in zip(wanted, found, numbers, strict=True)]))
    for number, why in enumerate(whys, start=1):
        print(f"({number}) {why}")
    if not args.only:
        print(f"written to {save('against_trl', found, about | {'only in TRL': ONLY_TRL})}")
    if wrong := [row["what"] for row in found if row["agrees"] == "NO"]:
        sys.exit(f"not as expected: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
