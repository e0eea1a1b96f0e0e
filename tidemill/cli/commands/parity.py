"""`tidemill parity`: compares engine, trainer, transformers, and a run's own record."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tidemill.cli.backend_parity import ParityReport, check
from tidemill.cli.commands.run_state import is_run, model_of, policies_in
from tidemill.cli.engine_check import EngineCheck, check_engine
from tidemill.cli.logprob_audit import Replay, VersionReplay, replay
from tidemill.core.config import build
from tidemill.observability.diagnosis.mismatch import EXACT, SAME, LogprobComparison
from tidemill.run.recipe import RunConfig
from tidemill.run.storage.run_folder import RunFolder


def parity(target: Path, length: int, as_json: bool) -> int:
    """Show the comparison. Returns 0 if all agrees, 1 if not or nothing was replayed."""
    run = RunFolder.existing(target) if target.is_dir() and is_run(target) else None
    replayed = asyncio.run(replay(run)) if run else None
    model = model_of(target) if run is None else _model_of(run)
    report = asyncio.run(check(model, length))
    engine = asyncio.run(check_engine(build(RunConfig, run.recipe()), model)) if run else None
    ok = report.ok and (replayed is None or replayed.ok) and (engine is None or engine.ok)
    live = ((run.summary() if run else None) or {}).get("mismatch_lag0")  # over all versions, while it ran
    if as_json:
        data = as_data(report)
        if replayed:
            data |= {"replay": replay_data(replayed, live), "engine": engine.data() if engine else None, "ok": ok}
        print(json.dumps(data, indent=2))
    else:
        _show(report)
        if engine:
            _show_engine(engine)
        if replayed:
            _show_replay(replayed, live)
    return 0 if ok else 1


def _model_of(run: RunFolder) -> Path:
    """The run's model, its first policy's, or the initial one of an unfinished run, which has no final/."""
    if not run.final.is_dir():
        return run.initial
    return run.final / names[0] if (names := policies_in(run.final)) else run.final


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
    return {
        "version": str(each.version),
        "folder": each.folder,
        "trajectories": each.trajectories,
        "differ": each.off,
        "first": each.first or None,
        "causes": dict(each.findings),
        **{compared.pair: compared.figures() for compared in (each.trainer, each.engine)},
    }


def as_data(report: ParityReport) -> dict[str, Any]:
    return {
        "model": report.model,
        "family": report.family,
        "dtype": "float32",
        "tolerance": SAME.most,
        "length": report.length,
        "text": report.text,
        "evidence": report.evidence,
        "comparisons": [_entry(c) for c in report.comparisons],
        "max": max(c.gap.maximum for c in report.comparisons if c.limit is SAME),
        "ok": report.ok,
    }


def _entry(c: LogprobComparison) -> dict[str, Any]:
    limit, ok = (None, None) if c.limit is None else (c.limit.most, c.ok)
    return {"what": c.what, "pair": c.pair, **c.figures(), "limit": limit, "ok": ok}


def _screen() -> Console:
    console = Console()
    if not console.is_terminal:
        console.width = 160  # a file or a pipe: do not wrap
    return console


def _table(title: str, head: str, rows: Iterable[tuple[Sequence[LogprobComparison], str]]) -> Table:
    listed = list(rows)
    pairs = list(dict.fromkeys(c.pair for compared, _ in listed for c in compared))
    table = Table(title=title, title_justify="left")
    table.add_column(head, no_wrap=True)
    for name in ("rows", "tokens", *(f"{pair}\nmean / p99 / max" for pair in pairs)):
        table.add_column(name, justify="right")
    table.add_column("", no_wrap=True)
    for compared, verdict in listed:
        by_pair = {c.pair: str(c) for c in compared}
        counts = f"{compared[0].rows:,}", f"{compared[0].gap.tokens:,}"
        style = None if verdict in ("ok", "reported") else "bold red"
        table.add_row(compared[0].what, *counts, *(by_pair.get(pair, "") for pair in pairs), verdict, style=style)
    return table


def _show(report: ParityReport) -> None:
    console = _screen()
    paths = dict.fromkeys(c.what for c in report.comparisons if c.limit is not EXACT)
    rows = [[c for c in report.comparisons if c.what == path] for path in paths]
    verdicts = (next((c.verdict for c in row if not c.ok), row[0].verdict) for row in rows)
    title = f"{report.model}  ({report.family}, float32, CPU; at most {SAME.most:g})"
    console.print(_table(title, "engine's path", zip(rows, verdicts, strict=True)))
    for c in report.comparisons:
        if c.limit is EXACT:
            verdict = "identical" if c.ok else f"DIFFER by up to {c.gap.maximum:.1e}"
            console.print(f"  {c.what}, read by {c.pair}: logits {verdict}", style=None if c.ok else "bold red")
        elif not c.ok:
            console.print(f"  {c.what}, {c.pair}: most in {c.worst}", style="bold red")
    missing = [name for name, count in report.evidence.items() if not count]
    seen = ", ".join(f"{count:,} {name}" for name, count in report.evidence.items())
    text = "random tokens and text" if report.text else "random tokens (the folder has no tokenizer)"
    console.print(f"  |difference| of logprobs in nats, on {text}; rows of {report.length} tokens; {seen}", highlight=False)
    if missing:
        console.print(f"  not tested: the engine reported no {' and no '.join(missing)}", style="bold red")
    console.print("  parity holds" if report.ok else "  parity does NOT hold", style="green" if report.ok else "bold red")


def _show_engine(engine: EngineCheck) -> None:
    console = _screen()
    if engine.missing:
        console.print(f"engine.kind = {engine.kind!r} could not be checked: {engine.missing}", style="bold red")
        return
    console.print(f"engine.kind = {engine.kind!r}, as the recipe has it", style="bold")
    console.print(f"  proof: {engine.proof}", highlight=False)
    if engine.audit:
        console.print(f"  audit: {engine.audit}", highlight=False)
    if (found := engine.sampling) is not None:
        figures = found.detail()
        console.print(
            f"  sampling: mean |difference| to the trainer {figures['logprob_gap']:.1e} nats, {found.gap.tokens:,} tokens; "
            f"frequencies of {found.replies:,} replies: chi-square {found.chi_square:.0f}, at most {found.most:.0f}",
            highlight=False,
        )
    if engine.fault:
        console.print(f"  {engine.fault}", style="bold red")


def _show_replay(replayed: Replay, live: dict[str, Any] | None) -> None:
    console = _screen()
    if replayed.replayed:
        rows = [((each.trainer, each.engine), f"{each.off} DIFFER" if each.off else "ok") for each in replayed.versions]
        console.print(_table(f"recorded trajectories, replayed ({replayed.dtype})", "version", rows))
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
