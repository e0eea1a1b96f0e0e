"""`tidemill ledger RUN`: was anything lost? The figures of the ledger, and in short what else it knows."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from tidemill.commands.screen import console, labelled, print_json, visible
from tidemill.ledger.ledger import SqliteLedger
from tidemill.ledger.records import Counts, EvalRecord, Event, StepRecord
from tidemill.types import Version

LATEST = 5  # events shown


def ledger(run: Path, as_json: bool) -> int:
    """The exit status: 0 when every admitted group has exactly one fate, else 1."""
    with SqliteLedger(run, mode="read") as record:
        counts = record.counts()
        if as_json:
            print_json(figures(counts))
        else:
            _show(console(), run, counts, record)
    return 0 if counts.conserved else 1


def figures(counts: Counts) -> dict[str, object]:
    """The view `conservation`, with the dropped by reason."""
    return {
        "admitted": counts.admitted,
        "trained": counts.trained,
        "dropped": counts.dropped,
        "pending": counts.pending,
        "lost": counts.lost,
        "trained_twice": counts.trained_twice,
    }


def _show(screen: Console, run: Path, counts: Counts, record: SqliteLedger) -> None:
    evaluations, events = record.evaluations(), record.events()
    rows: list[tuple[str, RenderableType]] = [
        ("groups", Text(_sum(counts))),
        ("", _verdict(counts)),
        ("steps", Text(_steps(record.steps(live=False)))),
        ("versions", Text(_versions(record.versions()))),
    ]
    if evaluations:
        rows.append(("held-out", _evaluations(evaluations)))
    if events:
        rows.append(("events", Text(_kinds(events))))
        rows += [("", _event(event)) for event in events[-LATEST:]]
    screen.print(Text(str(run), "bold"))
    screen.print(labelled(rows))


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
    """Counted as the progress display counts them: the ledger's step 0 is the first."""
    if not steps:
        return "none yet"
    live = {step.step: step for step in steps}  # the latest incarnation of each
    last = live[max(live)]
    if last.ended_at is None:
        now = f"step {last.step + 1} was begun {_ago(last.begun_at)} and has not ended"
    else:
        now = f"the last one ended {_ago(last.ended_at)}"
    again = sum(step.runs for step in steps) - len(live)
    replayed = f"; {again:,} recorded steps were trained again after a restart" if again else ""
    return f"{len(live):,} trained, {now}{replayed}" if last.ended_at else f"{len(live) - 1:,} trained, {now}{replayed}"


def _versions(versions: Sequence[Version]) -> str:
    if not versions:
        return "none published yet"
    lives = len({version.incarnation for version in versions})
    several = f" in {lives} incarnations" if lives > 1 else ""
    return f"{len(versions):,} published{several}, the latest {versions[-1]} ({versions[-1].fingerprint[:12]})"


def _evaluations(evaluations: Sequence[EvalRecord]) -> Table:
    """The first, the last and a few between."""
    few = max(1, -(-len(evaluations) // 8))
    shown = [e for i, e in enumerate(evaluations) if i % few == 0 or e is evaluations[-1]]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_edge=False)
    for title in ("after step", "accuracy", "tasks"):
        table.add_column(title, justify="right")
    for each in shown:
        accuracy = "–" if each.accuracy is None else f"{each.accuracy:.3f}"
        table.add_row(str(each.step), accuracy, "–" if each.n is None else f"{each.n:,}")
    return table


def _kinds(events: Sequence[Event]) -> str:
    counted = Counter(event.kind for event in events)
    return ", ".join(f"{kind} × {n:,}" if n > 1 else kind for kind, n in counted.items())


def _event(event: Event) -> Text:
    detail = ", ".join(f"{key} {value}" for key, value in event.detail.items())
    return Text(f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(event.at))}  {event.kind}  {visible(detail)}")


def _ago(at: float) -> str:
    seconds = max(0, round(time.time() - at))
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            n = seconds // size
            return f"{n} {unit}{'s' if n > 1 else ''} ago"
    return f"{seconds} s ago"
