"""`tidemill parity`: compares engine, trainer, transformers, and a run's own record."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tidemill.cli.backend_parity import TOLERANCE, Comparison, ParityReport, check
from tidemill.cli.commands.model_argument import is_run, model_of
from tidemill.cli.logprob_audit import Replay, VersionReplay, replay
from tidemill.observability.diagnosis.mismatch import LogprobGap
from tidemill.run.storage.run_folder import RunFolder

PAIRS = ("engine - transformers", "engine - trainer", "trainer - transformers")


def parity(target: Path, length: int, as_json: bool) -> int:
    """Show the comparison. Returns 0 when everything agrees.

    Returns 1 when something differs, or a run has nothing to replay.
    """
    run = RunFolder.existing(target) if target.is_dir() and is_run(target) else None
    replayed = asyncio.run(replay(run)) if run else None
    model = run.initial if run and not run.final.is_dir() else model_of(target)  # an unfinished run has no final/
    report = asyncio.run(check(model, length))
    ok = report.ok and (replayed is None or replayed.ok)
    live = ((run.summary() if run else None) or {}).get("mismatch_lag0")  # over all versions, while it ran
    if as_json:
        data = as_data(report)
        print(json.dumps(data | {"replay": replay_data(replayed, live), "ok": ok} if replayed else data, indent=2))
    else:
        _show(report)
        if replayed:
            _show_replay(replayed, live)
    return 0 if ok else 1


def replay_data(replayed: Replay, live: dict[str, Any] | None) -> dict[str, Any]:
    """The audit of a run as JSON data. live: the run's own measurement on the latest weights."""
    return {
        "while_it_ran": live,
        "dtype": replayed.dtype,
        "limit": {"mean": replayed.limit.mean, "p99": replayed.limit.p99},
        "versions": [_version_entry(each) for each in replayed.versions],
        "strangers": replayed.strangers,
        "replayed": replayed.replayed,
        "not_on_disk": replayed.elsewhere,
        "removed": replayed.removed,
        "unreadable": replayed.unreadable,
        "ok": replayed.ok,
    }


def _version_entry(each: VersionReplay) -> dict[str, Any]:
    pairs = {"recorded - trainer": each.trainer, "recorded - engine": each.engine}
    return {
        "version": str(each.version),
        "folder": each.folder,
        "trajectories": each.trajectories,
        "differ": each.off,
        "first": each.first or None,
        "causes": dict(each.findings),
        **{pair: _gap_entry(gap) for pair, gap in pairs.items()},
    }


def _gap_entry(gap: LogprobGap) -> dict[str, Any]:
    found = gap.metrics()
    figures = {"mean": "logprob_gap", "p99": "logprob_gap_p99", "max": "logprob_gap_max"}
    return {"tokens": gap.tokens} | {name: found[key] for name, key in figures.items()}


def as_data(report: ParityReport) -> dict[str, Any]:
    return {
        "model": report.model,
        "family": report.family,
        "dtype": "float32",
        "tolerance": TOLERANCE,
        "length": report.length,
        "text": report.text,
        "evidence": report.evidence,
        "comparisons": [_entry(c) for c in report.comparisons],
        "max": max(c.max for c in report.comparisons if c.limit == TOLERANCE),
        "ok": report.ok,
    }


def _entry(c: Comparison) -> dict[str, Any]:
    entry = {"what": c.what, "pair": c.pair, "tokens": c.tokens, "max": c.max, "mean": c.mean, "limit": c.limit}
    return entry | {"ok": c.ok if c.limit is not None else None}


def _show(report: ParityReport) -> None:
    table = Table(title=f"{report.model}  ({report.family}, float32, CPU)", title_justify="left")
    table.add_column("engine's path", no_wrap=True)
    table.add_column("tokens", justify="right")
    for pair in PAIRS:
        table.add_column(f"{pair}\nmax / mean", justify="right")
    table.add_column(f"<= {TOLERANCE:g}")
    for path in dict.fromkeys(c.what for c in report.comparisons if c.limit != 0):
        row = {c.pair: c for c in report.comparisons if c.what == path}
        values = [f"{row[pair].max:.1e} / {row[pair].mean:.1e}" if pair in row else "" for pair in PAIRS]
        ok, judged = all(c.ok for c in row.values()), all(c.limit is not None for c in row.values())
        count = next(iter(row.values())).tokens
        verdict = ("ok" if ok else "FAILED") if judged else "reported"
        table.add_row(path, f"{count:,}", *values, verdict, style=None if ok else "bold red")
    console = Console()
    if not console.is_terminal:
        console.width = 160  # a file or a pipe: do not wrap
    console.print(table)
    for c in report.comparisons:
        if c.limit == 0:
            verdict = "identical" if c.ok else f"DIFFER by up to {c.max:.1e}"
            console.print(f"  {c.what}, read by {c.pair}: logits {verdict}", style=None if c.ok else "bold red")
    missing = [name for name, count in report.evidence.items() if not count]
    seen = ", ".join(f"{count:,} {name}" for name, count in report.evidence.items())
    text = "random tokens and text" if report.text else "random tokens (the folder has no tokenizer)"
    console.print(f"  |difference| of logprobs in nats, on {text}; rows of {report.length} tokens; {seen}", highlight=False)
    if missing:
        console.print(f"  not tested: the engine reported no {' and no '.join(missing)}", style="bold red")
    console.print("  parity holds" if report.ok else "  parity does NOT hold", style="green" if report.ok else "bold red")


def _show_replay(replayed: Replay, live: dict[str, Any] | None) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = 160
    if replayed.replayed:
        table = Table(title=f"recorded trajectories, replayed ({replayed.dtype})", title_justify="left")
        table.add_column("version", no_wrap=True)
        for name in ("trajectories", "tokens"):
            table.add_column(name, justify="right")
        for pair in ("recorded - trainer", "recorded - engine"):
            table.add_column(f"{pair}\nmean / p99 / max", justify="right")
        table.add_column("", no_wrap=True)
        for each in replayed.versions:
            gaps = [
                " / ".join(f"{_gap_entry(g)[k]:.1e}" for k in ("mean", "p99", "max")) for g in (each.trainer, each.engine)
            ]
            counts = f"{each.trajectories:,}", f"{each.trainer.tokens:,}"
            verdict = f"{each.off} DIFFER" if each.off else "ok"
            table.add_row(str(each.version), *counts, *gaps, verdict, style="bold red" if each.off else None)
        console.print(table)
    for each in replayed.versions:
        for cause, count in each.findings.items():
            console.print(f"  {each.version}: {cause}, in {count} looked at; first in {each.first}", style="bold red")
    for stranger in replayed.strangers:
        console.print(f"  {stranger}", style="bold red")
    left = (
        f"{replayed.elsewhere:,} of versions that are not on disk, or of several; {replayed.removed:,} removed by retention"
        + (f"; {replayed.unreadable:,} unreadable" if replayed.unreadable else "")
    )
    console.print(f"  not replayed: {left}", highlight=False)
    if not replayed.replayed and replayed.given:
        console.print("  the tasks gave what was learnt, and no weights sampled it: nothing to replay")
    elif not replayed.replayed:
        console.print(
            "  there is no recorded trajectory of a version whose weights are on disk: nothing to replay", style="bold red"
        )
    elif replayed.ok:
        console.print("  what was recorded is what these weights say", style="green")
