"""`tidemill drill RECIPE`: runs it while parts are killed, and shows what was lost."""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.text import Text

from tidemill.cli.chaos_test import FAULTS, Drill, Outcome
from tidemill.cli.commands.screen import Row, console, print_json, show_rows
from tidemill.cli.process_lives import GROWN_S, JUDGED_S, Life
from tidemill.core.errors import ConfigError
from tidemill.run.recipe import load_recipe

ENDLESS = 1_000_000  # steps: the drill ends by its time, not by its steps


def drill(
    recipe: Path, minutes: float, every: float, seed: int, spare: Sequence[str], overrides: Sequence[str], as_json: bool
) -> int:
    """Run a drill. Returns 0 when nothing was lost, trained twice or left behind, else 1."""
    roles = sorted({role for _, role, _ in FAULTS})
    if unknown := sorted(set(spare) - set(roles)):
        raise ConfigError(f"--spare {unknown[0]}: expected one of {', '.join(roles)}")
    given = [o.partition("=")[0] for o in overrides]
    named = [] if "run_dir" in given else [f"run_dir=runs/{recipe.stem}-drill"]
    patient = ["supervise.resume=true", "supervise.restarts=100000", "supervise.backoff_s=0.5", "supervise.silent_s=5"]
    lasting = [*overrides, *named, f"steps={ENDLESS}", *(p for p in patient if p.partition("=")[0] not in given)]
    config = load_recipe([recipe], lasting)
    if config.run_dir.exists() and any(config.run_dir.iterdir()):
        raise ConfigError(f"{config.run_dir} exists: a drill begins a run of its own; remove it, or give run_dir=...")
    screen = console()
    note = (lambda text: None) if as_json else (lambda text: screen.print(text, style="dim"))
    seconds = 60 * minutes
    outcome = Drill(
        config,
        [sys.executable, "-m", "tidemill", "train", str(recipe), *lasting],
        seconds=seconds,
        calm_s=min(60.0, seconds / 5),
        every_s=every,
        seed=seed,
        spare=spare,
        note=note,
    ).run()
    if as_json:
        print_json(asdict(outcome) | {"ok": outcome.ok})
    else:
        _show(config.run_dir, outcome)
    return 0 if outcome.ok else 1


def _show(run: Path, outcome: Outcome) -> None:
    groups = outcome.groups
    reached = Counter(f"{fault.what} {fault.whom.partition('-')[0]}" for fault in outcome.faults)
    kinds = ", ".join(f"{n} × {kind}" for kind, n in sorted(reached.items()))
    roles = dict[str, list[Life]]()
    for life in outcome.lives:
        roles.setdefault(life.name.partition("-")[0], []).append(life)
    back = [f.recovered_s for f in outcome.faults if f.recovered_s is not None]
    typical = f"; the next step ended {statistics.median(back):.1f} s later (median)" if back else ""
    share = outcome.rate / outcome.calm_rate if outcome.calm_rate else 0.0
    rows: list[Row] = [
        ("time", f"{outcome.seconds / 60:.1f} min, {outcome.calm_s / 60:.1f} of them undisturbed"),
        ("faults", f"{len(outcome.faults)}: {kinds}{typical}"),
        ("controller", f"started {outcome.starts} times, exit statuses {outcome.statuses}"),
        ("groups", ", ".join(f"{key} {value}" for key, value in groups.items())),
        ("speed", f"{outcome.calm_rate:.1f} -> {outcome.rate:.1f} groups/s trained: {100 * share:.0f} % of undisturbed"),
    ]
    rows += [(role, _lived(lives)) for role, lives in sorted(roles.items())]
    rows.append(("left over", Text("; ".join(outcome.left) or "no process", "bold red" if outcome.left else "")))
    lost = groups.get("lost", 0) or groups.get("trained_twice", 0)
    verdict = Text("NOT conserved", "bold red") if lost else Text("nothing lost, nothing trained twice", "green")
    rows.append(("ledger", verdict))
    show_rows(str(run), rows)


def _lived(lives: Sequence[Life]) -> str:
    """A role's processes: their number, the growth of the oldest, and the range of all."""
    oldest = max(lives, key=lambda life: life.seconds)
    there_were = "1 process" if len(lives) == 1 else f"{len(lives)} processes"
    if oldest.early is None:
        size = f"{oldest.late.resident_mb:.0f} MB resident, {oldest.late.files} open files"
        return f"{there_were}, none older than {JUDGED_S / 60:g} min; {size}"
    early, late = oldest.early, oldest.late
    grown, opened = zip(*(growth for life in lives if (growth := life.growth) is not None), strict=True)
    memory = f"{early.resident_mb:.0f} -> {late.resident_mb:.0f} MB resident, {early.files} -> {late.files} open files"
    every = f"{len(grown)} older than {JUDGED_S / 60:g} min: {_range(grown, '.1f')} %, {_range(opened, 'd')} open files"
    return f"{there_were}; the oldest, {oldest.seconds / 60:.1f} min: {memory}; {every} since their {GROWN_S / 60:g} min"


def _range(values: Sequence[float], form: str) -> str:
    low, high = (format(bound, f"+{form}") for bound in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"
