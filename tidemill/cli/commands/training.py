"""`tidemill train` and `tidemill demo`: train by a recipe and show the result."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tidemill.cli.commands.screen import console, own_name, print_json, print_labelled, print_wrapped
from tidemill.core.amounts import amount
from tidemill.core.episode_counts import worded_counts
from tidemill.core.errors import PeerLost
from tidemill.observability.console import ProgressDisplay
from tidemill.observability.safe_text import visible
from tidemill.observability.time_breakdown import lines
from tidemill.run.recipe import RunConfig, load_recipe
from tidemill.run.report import finals, unscored_of
from tidemill.run.session import RunEnded, run

RECIPES = next(p for p in (Path(__file__).parents[2] / "recipes", Path(__file__).parents[3] / "recipes") if p.is_dir())
"""The recipes of an installed package, or of a clone."""
DEMO = RECIPES / "demo.toml"
MADE_WORDS = 'env={ kind = "python", path = "tidemill.envs.spelling:score" }'


def by_recipe(recipe: Path, overrides: Sequence[str], as_json: bool) -> int:
    """Train by a recipe, or resume. Returns 0 when done, 3 when stopped before the last step."""
    config = load_recipe([recipe], overrides)
    display = ProgressDisplay(config.steps, mode="json" if as_json else "auto")
    try:
        ended = asyncio.run(run(config, display))
    except (PeerLost, asyncio.CancelledError, KeyboardInterrupt) as error:
        cause = asyncio.CancelledError() if isinstance(error, KeyboardInterrupt) else error  # typer would hide it
        cause.add_note("the same command goes on from what is recorded")
        raise cause from error.__cause__
    if as_json:
        print_json({"kind": "report", **ended.report})
    else:
        show_end(config, recipe, ended, newcomer=recipe.resolve() == DEMO.resolve())
    return 0 if ended.complete else 3


def demo(overrides: Sequence[str], as_json: bool) -> int:
    """Run the demo's recipe, with made-up words if reasoning-gym is not installed."""
    made = [] if importlib.util.find_spec("reasoning_gym") else [MADE_WORDS]
    if made and not as_json:
        print(
            "  reasoning-gym is not installed, so the words are made up here; pip install 'tidemill[gym]' brings real ones"
        )
    return by_recipe(DEMO, [*made, *overrides], as_json)


def show_end(config: RunConfig, recipe: Path, ended: RunEnded, newcomer: bool) -> None:
    """Print the end of a run. newcomer: also explain how to begin a task of one's own."""
    screen, report = console(), ended.report
    screen.print()
    for rows, style in (
        (_time(report), "dim"),
        (
            [
                ("ledger", _ledger(report)),
                *_judged(report),
                *worded_counts(report.get("counts", {}), visible(report.get("refused", ""))),
            ],
            "",
        ),
        (_next(config, report, ended.complete, newcomer), ""),
    ):
        print_labelled(screen, rows, style)
    screen.print()
    fell, nothing = report.get("unlearned"), report.get("unearned")  # an older run's report has none
    colour = "red" if fell or nothing else "green" if ended.complete else "yellow"
    print_labelled(screen, _result(config, ended), f"bold {colour}")
    if fell:
        for text in unlearned(fell, config, f"{own_name()} reward test {recipe}"):
            print_wrapped(screen, text, "bold red")
    if nothing:
        test = f"`{own_name()} reward test {recipe}`"
        print_wrapped(screen, f"UNEARNED: {nothing['text'].replace('`tidemill reward test RECIPE`', test)}", "bold red")


def _time(report: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("time", f"{name}: {said}") for name, said in lines(report.get("time_by_process", {}))]
    advice = report.get("advice")
    return [*rows, *([("faster", advice["text"])] if advice else [])]


def _ledger(report: dict[str, Any]) -> str:
    groups = report["groups"]
    dropped = [f"{n:,} {reason}" for reason, n in groups["dropped"].items()]
    parts = [f"{groups['trained']:,} trained", *dropped, f"{groups['pending']:,} pending", f"{groups['lost']} lost"]
    return f"{groups['admitted']:,} groups = {' + '.join(parts)}"


def _judged(report: dict[str, Any]) -> list[tuple[str, str]]:
    judging = report.get("judging")  # an older run's report has none
    if not judging or not (judging["infra_errors"] or judging["unscorable"]):
        return []
    scored, errors, unscorable = (judging[k] for k in ("scored", "infra_errors", "unscorable"))
    said = f"{scored:,} scored, {amount(errors, 'infrastructure error')} and {unscorable:,} unscorable (not trained on)"
    return [("judged", said)]


def _next(config: RunConfig, report: dict[str, Any], complete: bool, newcomer: bool) -> list[tuple[str, str]]:
    folder, me = config.run_dir, own_name()
    following = [f"samples {folder} --worst 3 --tokens"]
    if complete:
        served = finals(report, folder)[0] if config.policies else folder
        following += [f"eval {folder}", "new mytask" if newcomer else f"serve {served}"]
    return [("next", f"{me} {command}") for command in following]


def _result(config: RunConfig, ended: RunEnded) -> list[tuple[str, str]]:
    report = ended.report
    if ended.complete:
        took, earlier = duration(report["wall_s"]), report.get("steps_before", 0)  # an older run's report has none
        took = f", {took} since it went on after step {earlier}" if earlier else f" in {took}"
        rows = [
            ("done", f"{amount(report['steps'], 'step')}{took}"),
            *(("model", f"{folder} (Hugging Face format)") for folder in finals(report, config.run_dir)),
        ]
    else:
        rows = [("stopped", f"after step {report['steps']} of {config.steps}; the same command goes on from there")]
    before, after, n = report["accuracy_before"], report["accuracy_after"], report["held_out"]
    if before is not None and after is not None and n is not None:
        first = report.get("held_out_before", n)  # an older run's report has none
        of = "" if first == n else f" on {amount(first, 'task')}"
        said = f"held-out accuracy {before:.3f}{of} → {after:.3f} on {amount(n, 'task')}{unscored_of(report)}"
        rows.append(("result", said))
    if given := report.get("held_out_given"):
        both = [(name, was, given["after"][name]) for name, was in given["before"].items() if name in given["after"]]
        changes = [f"{name.replace('_', ' ')} {was:.3f} → {now:.3f}" for name, was, now in both]
        rows.append(("result", f"held-out {', '.join(changes)} on {amount(n or 0, 'task')}"))
    return rows


def unlearned(fell: dict[str, Any], config: RunConfig, test: str) -> list[str]:
    """Sentences on a fall of accuracy: the figures, then the commonest causes in their order."""
    n, m = (f"{fell[key]:,}" for key in ("n_before", "n_after"))
    tasks = f"on {n} tasks" if n == m else f"on {n} and {m} tasks"
    found = [
        f"UNLEARNED: held-out accuracy fell from {fell['before']:.3f} to {fell['after']:.3f} {tasks}, by "
        f"{fell['errors']:.1f} standard errors of the difference: the model solves less than the one that the run began with"
    ]
    if fell["unjudged"]:
        found.append(f"{fell['unjudged']:,} of the {m} could not be judged and count as not solved: mend that first")
    lag = f"max_lag={config.max_lag} (0 trains on nothing stale)" if config.max_lag else ""
    looks = [f"trainer.lr={config.trainer.lr:g} (try a tenth)", f"the reward (`{test}`)", lag]
    return [*found, f"look first at: {', '.join(filter(None, looks))}"]


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
