"""`tidemill parity`: engine, trainer and transformers compared on one model."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tidemill.commands.located import model_of
from tidemill.parity import TOLERANCE, Comparison, Report, check

PAIRS = ("engine - transformers", "engine - trainer", "trainer - transformers")


def parity(model: Path, length: int, as_json: bool) -> int:
    """The exit status: 0 when everything agrees, 1 when something does not."""
    report = asyncio.run(check(model_of(model), length))
    if as_json:
        print(json.dumps(as_data(report), indent=2))
    else:
        _show(report)
    return 0 if report.ok else 1


def as_data(report: Report) -> dict[str, Any]:
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


def _show(report: Report) -> None:
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
        console.width = 160  # of a file or a pipe: nothing is wrapped there
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
