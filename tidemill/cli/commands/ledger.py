"""`tidemill ledger RUN`: every group's fate, and a summary of the rest of the ledger."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from tidemill.cli.commands.screen import Row, print_json, show_rows
from tidemill.core.amounts import amount
from tidemill.core.types import Version
from tidemill.ledger.ledger import SqliteLedger
from tidemill.ledger.records import Counts, EvalRecord, Event, StepRecord
from tidemill.observability.console_table import held_out
from tidemill.observability.events import worded
from tidemill.observability.safe_text import visible

LATEST = 5  # events shown, unless all are asked for
FEW = 8  # evaluations shown, and the last one


def ledger(run: Path, every: bool, as_json: bool) -> int:
    """Show the ledger. Returns 0 when every admitted group has exactly one fate, else 1."""
    with SqliteLedger(run, mode="read") as record:
        counts = record.counts()
        if as_json:
            print_json(counts.figures())
        else:
            _show(run, counts, record, every)
    return 0 if counts.conserved else 1


def _show(run: Path, counts: Counts, record: SqliteLedger, every: bool) -> None:
    evaluations, events = record.evaluations(), record.events()
    undone = set(record.undone_steps())
    few, latest = (evaluations, events) if every else (_few(evaluations), events[-LATEST:])
    rows: list[Row] = [
        ("groups", _sum(counts)),
        ("", _verdict(counts)),
        ("steps", _steps([s for s in record.steps(live=False) if (s.step, s.incarnation) not in undone])),
        ("versions", _versions(record.versions())),
    ]
    if evaluations:
        rows.append(("held-out", _evaluations(few)))
    if events:
        rows.append(("events", _kinds(events)))
        rows += [("", _event(event)) for event in latest]
    screen = show_rows(str(run), rows)
    counted = (("evaluation", len(evaluations) - len(few)), ("earlier event", len(events) - len(latest)))
    if left := [f"{n:,} {noun}{'s' if n > 1 else ''}" for noun, n in counted if n]:
        screen.print(Text(f"\n  not shown: {', '.join(left)}; --all shows them", "dim"))


def _sum(counts: Counts) -> str:
    dropped = [f"{n:,} dropped ({reason})" for reason, n in counts.dropped.items()]
    parts = [f"{counts.trained:,} trained", *dropped, f"{counts.pending:,} pending"]
    return f"{counts.admitted:,} admitted = {' + '.join(parts)}"


def _verdict(counts: Counts) -> Text:
    twice = f"{counts.lost:,} lost, {counts.trained_twice:,} trained twice"
    if counts.conserved:
        return Text(f"conserved: {twice}", "green")
    return Text(
        f"NOT conserved: {twice}; keep this folder as it is and ask its tables which groups, see docs/ledger.md", "bold red"
    )


def _steps(steps: Sequence[StepRecord]) -> str:
    """Steps, counted from 1 as in the progress display."""
    if not steps:
        return "none yet"
    live = {step.step: step for step in steps}  # by step, its latest incarnation
    last = live[max(live)]
    if last.ended_at is None:
        now = f"step {last.step + 1} was begun {_ago(last.begun_at)} and has not ended"
    else:
        now = f"the last one ended {_ago(last.ended_at)}"
    again = sum(step.runs for step in steps) - len(live)
    noun = "step was" if again == 1 else "steps were"
    replayed = f"; {again:,} recorded {noun} trained again after a restart" if again else ""
    return f"{sum(step.ended_at is not None for step in live.values()):,} trained, {now}{replayed}"


def _versions(versions: Sequence[Version]) -> str:
    if not versions:
        return "none published yet"
    lives = len({version.incarnation for version in versions})
    several = f" in {lives} incarnations" if lives > 1 else ""
    return f"{len(versions):,} published{several}, the latest {versions[-1]} ({versions[-1].fingerprint[:12]})"


def _few(evaluations: Sequence[EvalRecord]) -> Sequence[EvalRecord]:
    stride = max(1, -(-len(evaluations) // FEW))
    return [e for i, e in enumerate(evaluations) if i % stride == 0 or e is evaluations[-1]]


def _evaluations(evaluations: Sequence[EvalRecord]) -> str:
    return "\n".join(f"{_figures(e)} on {amount(e.n or 0, 'task')} after step {e.step:,}" for e in evaluations)


def _figures(evaluation: EvalRecord) -> str:
    """The accuracy, and metrics of offline replies beside it or in its place."""
    accuracy = [] if evaluation.accuracy is None else [f"{evaluation.accuracy:.3f}"]
    rest = held_out({name: value for name, value in evaluation.metrics.items() if name != "accuracy" and value is not None})
    return ", ".join([*accuracy, *([rest] if rest else [])]) or "no accuracy"


def _kinds(events: Sequence[Event]) -> str:
    counted = Counter(event.kind for event in events)
    return ", ".join(f"{kind} × {n:,}" if n > 1 else kind for kind, n in counted.items())


def _event(event: Event) -> str:
    said = visible(worded(event.kind, event.detail))
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(event.at))}  {said}"


def _ago(at: float) -> str:
    seconds = max(0, round(time.time() - at))
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            n = seconds // size
            return f"{n} {unit}{'s' if n > 1 else ''} ago"
    return f"{seconds} s ago"
