"""`tidemill why RUN`: shows what a run waits for, or the first cause of its end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.text import Text

from tidemill.cli.commands.run_state import state_of
from tidemill.cli.commands.screen import Row, print_json, show_rows
from tidemill.core.amounts import amount
from tidemill.core.episode_counts import worded_counts
from tidemill.ledger.ledger import SqliteLedger
from tidemill.observability.events import worded
from tidemill.observability.safe_text import visible
from tidemill.run.storage.run_folder import RunFolder

ROUTINE = ("checkpoint", "reward_check", "sandbox")  # events that explain nothing


def why(run: Path, as_json: bool) -> int:
    """Show a run's state. Returns 0 if it runs or is complete, else 1."""
    about = standing(RunFolder.existing(run))
    if as_json:
        print_json(about)
    else:
        _show(run, about)
    return 0 if about["state"] in ("running", "complete") else 1


def standing(folder: RunFolder) -> dict[str, Any]:
    """A run's state as data, with the last status that its process wrote."""
    found = state_of(folder)
    unearned = ((found.report or {}).get("unearned") or {}).get("text")  # reports of older runs have none
    with SqliteLedger(folder.path, mode="read") as ledger:
        counts = ledger.counts().figures()
        events = [{"at": e.at, "kind": e.kind, **e.detail} for e in ledger.events() if e.kind not in ROUTINE][-5:]
    share = (found.report or found.status or {}).get("engine_share")  # older runs have none
    about = {"state": found.name, "pid": found.pid, "status": found.status, "failure": found.failure, "unearned": unearned}
    return about | {"groups": counts, "events": events, "engine_share": share}


def _show(run: Path, about: dict[str, Any]) -> None:
    status = about["status"]
    live = about["state"] in ("running", "stuck")
    rows: list[Row] = [("state", Text(_state(about), "green" if live else "bold"))]
    if (failure := about["failure"]) is not None:
        first, *rest = failure["message"].splitlines() or [failure["kind"]]
        rows.append(("first cause", Text(visible(first), "bold red")))
        rows += [("", visible(line)) for line in rest]
    if about["unearned"] is not None:
        rows.append(("unearned", Text(about["unearned"], "bold red")))
    if status is not None:
        step = f"step {status.get('step', '?')} of {status.get('steps', '?')}, {_age(status['at'])}"
        rows.append(("at" if live else "last at", step))
        if live or about["state"] == "killed":  # a run that ended by itself waits for nothing
            waits, processes = ("waits", "processes") if live else ("was waiting", "had processes")
            rows += [(waits if i == 0 else "", _wait(w, status["at"])) for i, w in enumerate(status["waits"])]
            rows += [(processes if i == 0 else "", _process(p)) for i, p in enumerate(status["processes"])]
        rows += _attempts(status)
    if (share := about["engine_share"]) is not None:
        rows.append(("engines", visible(share["text"])))
    rows += [("events" if i == 0 else "", _event(e)) for i, e in enumerate(about["events"])]
    screen = show_rows(str(run), rows)
    if failure is not None and about["state"] == "failed" and not failure.get("whole"):  # older runs' files do not say
        screen.print(Text("\n".join(visible(line) for line in failure["trace"].expandtabs().splitlines()), "dim"))


def _attempts(status: dict[str, Any]) -> list[Row]:
    """The attempts of the last process: how many have a score, the commonest reasons, and what their parts counted."""
    judging = status.get("judging")  # a status of an older version has none
    if not judging:
        return []
    errors = amount(judging["infra_errors"], "infra error")
    said = f"{judging['scored']:,} scored, {judging['unscorable']:,} unscorable, {errors}"
    reasons = [f"{visible(reason)}{_times(n)}" for reason, n in judging["reasons"].items()]
    found = [("attempts", said), *(("", each) for each in reasons)] if judging["scored"] or reasons else []  # of training
    return [*found, *worded_counts(status.get("counts", {}), visible(status.get("refused", "")))]


def _state(about: dict[str, Any]) -> str:
    went = "the same command goes on from there"
    match about["state"]:
        case "running":
            return f"running, process {about['pid']}"
        case "stuck":
            return f"process {about['pid']} is stopped (SIGSTOP): kill -CONT {about['pid']} lets it go on"
        case "complete":
            return "complete: it came to its last step"
        case "stopped":
            return f"stopped when it was asked to; {went}"
        case "failed":
            return f"ended by an error {_age(about['failure']['at'])}; {went} once its cause is gone"
    return f"killed: it ended without a word (kill -9, out of memory, power); {went}"


def _wait(wait: dict[str, Any], now: float) -> str:
    times = _times(wait["count"])
    limit = f" of at most {wait['limit_s']:g} s" if wait["limit_s"] is not None else ""
    whom = f"{visible(wait['peer'])}: {visible(wait['what'])}"
    return f"the controller for {whom}{times}, since {now - wait['since']:.1f} s{limit}"


def _times(count: int) -> str:
    return f" × {count}" if count > 1 else ""


def _process(process: dict[str, Any]) -> str:
    alike = dict[str, list[float]]()  # method -> seconds of its calls, oldest first
    for method, seconds in process["busy"]:
        alike.setdefault(method, []).append(seconds)
    calls = [f"{method}{_times(len(each))} for {each[0]:.1f} s" for method, each in alike.items()]
    busy = ", ".join(calls[:3]) or "idle"
    alive = f"heard {process['heard']:.1f} s before" if process["alive"] else "ended"
    return f"{visible(process['name'])} ({process['pid']}): {alive}, {busy}"


def _event(event: dict[str, Any]) -> str:
    detail = {key: value for key, value in event.items() if key not in ("at", "kind")}
    first, _, _ = worded(event["kind"], detail).partition("\n")
    return f"{_age(event['at'])}: {visible(first)}"


def _age(at: float) -> str:
    seconds = max(0.0, time.time() - at)
    return f"{seconds:.0f} s ago" if seconds < 120 else f"{seconds / 60:.0f} min ago"
