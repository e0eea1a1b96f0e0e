"""`tidemill train` and `tidemill demo`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from tidemill.commands.screen import console, own_name
from tidemill.errors import ConfigError
from tidemill.observability.display import ProgressDisplay
from tidemill.protocols import PeerLost
from tidemill.recipe import RunConfig, load_recipe
from tidemill.session import Ended, run

DEMO = Path(__file__).parents[2] / "recipes" / "demo.toml"


def train(recipe: Path, overrides: Sequence[str], as_json: bool) -> int:
    """Run a recipe to its end, or on from where it was. The exit status: 0 done, 3 stopped before its last step."""
    config = load_recipe([recipe], overrides)
    ended = _run(config, as_json)
    _tell(config, recipe, ended, as_json)
    return 0 if ended.complete else 3


def demo(overrides: Sequence[str], as_json: bool) -> int:
    if not DEMO.is_file():
        raise ConfigError(f"{DEMO} does not exist: the demo is part of the repository, run it from a clone")
    return train(DEMO, overrides, as_json)


def _run(config: RunConfig, as_json: bool) -> Ended:
    display = ProgressDisplay(config.steps, mode="json" if as_json else "auto")
    try:
        return asyncio.run(run(config, display))
    except (PeerLost, asyncio.CancelledError, KeyboardInterrupt) as error:
        ended = asyncio.CancelledError() if isinstance(error, KeyboardInterrupt) else error  # that one typer would hide
        ended.add_note("the same command goes on from what is recorded")
        raise ended from error.__cause__


def _tell(config: RunConfig, recipe: Path, ended: Ended, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"kind": "report", **ended.report}))
        return
    report, folder = ended.report, config.run_dir
    groups = report["groups"]
    dropped = " + ".join(f"{n:,} {reason}" for reason, n in groups["dropped"].items())
    parts = [f"{groups['trained']:,} trained", *([dropped] if dropped else []), f"{groups['pending']:,} pending"]
    before, after, n = report["accuracy_before"], report["accuracy_after"], report["held_out"]
    if ended.complete:
        took, earlier = _duration(report["wall_s"]), report.get("steps_before", 0)  # an older run's report has none
        took = f", {took} since it went on after step {earlier}" if earlier else f" in {took}"
        print(f"  done: {report['steps']} steps{took}   model: {folder / 'final'} (Hugging Face)")
    else:
        print(f"  stopped after step {report['steps']} of {config.steps}; the same command goes on from there")
    if before is not None and after is not None and n is not None:
        first = report.get("held_out_before", n)  # an older run's report has none
        of = "" if first == n else f" on {first:,} tasks"
        print(f"  held-out accuracy {before:.3f}{of} -> {after:.3f} on {n:,} tasks")
    if given := report.get("held_out_given"):
        both = [(name, was, given["after"][name]) for name, was in given["before"].items() if name in given["after"]]
        changes = [f"{name.replace('_', ' ')} {was:.3f} -> {now:.3f}" for name, was, now in both]
        print(f"  held-out {', '.join(changes)} on {n:,} tasks")
    print(f"  ledger: {groups['admitted']:,} groups = {' + '.join(parts)} + {groups['lost']} lost")
    judging = report.get("judging")  # an older run's report has none
    if judging and (judging["infra_errors"] or judging["unscorable"]):
        scored, errors, unscorable = (judging[k] for k in ("scored", "infra_errors", "unscorable"))
        print(
            f"  judged: {scored:,} scored, {errors:,} infrastructure errors and {unscorable:,} unscorable (not trained on)"
        )
    for line in _time_went(report.get("time_by_process", {})):
        print(f"  {line}")
    if advice := report.get("advice"):
        print(f"  to go faster: {advice['text']}")
    me = own_name()
    if fell := report.get("unlearned"):
        console().print(Text("\n".join(_unlearned(fell, config, f"{me} reward test {recipe}")), "bold red"), soft_wrap=True)
    following = [f"samples {folder} --worst 3 --tokens"]
    if ended.complete:
        following += [f"eval {folder}", "new mytask" if recipe.resolve() == DEMO.resolve() else f"serve {folder}"]
    print(f"  next:   {'  ·  '.join(f'{me} {command}' for command in following)}")
    if nothing := report.get("unearned"):  # last of all; an older run's report has none
        text = nothing["text"].replace("`tidemill reward test RECIPE`", f"`{me} reward test {recipe}`")
        console().print(Text(f"  UNEARNED: {text}", "bold red"), soft_wrap=True)


def _unlearned(fell: dict[str, Any], config: RunConfig, test: str) -> list[str]:
    """What happened, and what to look at first: the commonest causes in their order."""
    n, m = (f"{fell[key]:,}" for key in ("n_before", "n_after"))
    tasks = f"on {n} tasks" if n == m else f"on {n} and {m} tasks"
    lines = [
        f"  UNLEARNED: held-out accuracy fell from {fell['before']:.3f} to {fell['after']:.3f} {tasks}, by "
        f"{fell['errors']:.1f} standard errors of the difference: the model solves less than the one that the run began with"
    ]
    if fell["unjudged"]:
        lines.append(f"  {fell['unjudged']:,} of the {m} could not be judged and count as not solved: mend that first")
    lag = f"max_lag={config.max_lag} (0 trains on nothing stale)" if config.max_lag else ""
    looks = [f"trainer.lr={config.trainer.lr:g} (try a tenth)", f"the reward (`{test}`)", lag]
    return [*lines, f"  look first at: {', '.join(filter(None, looks))}"]


def _time_went(processes: dict[str, dict[str, float]]) -> list[str]:
    """One line for each process, the largest share first."""
    lines = []
    for name, kinds in processes.items():
        shown = [f"{share:.0%} {kind}" for kind, share in sorted(kinds.items(), key=lambda k: -k[1]) if share >= 0.005]
        lines.append(f"{name}: {', '.join(shown)}")
    return lines


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
