"""`report.json`: the measured figures of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemill.controller.evaluation import errors_apart, interval
from tidemill.controller.offline_groups import FIGURES
from tidemill.controller.run_monitor import Totals
from tidemill.core.amounts import amount
from tidemill.core.episode_counts import counts_in
from tidemill.core.hardware import usable_cores
from tidemill.core.types import Metrics
from tidemill.envs.environment_mixture import sandboxes_of
from tidemill.ledger.records import EvalRecord
from tidemill.models.architecture import Architecture, parameters
from tidemill.observability.bottleneck_advisor import Setup, advise, advise_engines
from tidemill.observability.console_table import unscored_in, without_score
from tidemill.observability.engine_share import EngineUse
from tidemill.observability.time_breakdown import CONTROLLER, REFERENCE, TRAINER, Account
from tidemill.run.planner.plan import RunPlan
from tidemill.run.zero_reward import unearned

if TYPE_CHECKING:
    from tidemill.run.session import Session

MOST_CUTS = 10  # limits in the list of those that cut replies off
CLEARLY = 2.0  # standard errors beyond which a fall of held-out accuracy is not chance


def make_report(session: Session, before: int, wall_s: float) -> dict[str, Any]:
    """Build the report of a session that trained, as JSON data.

    before: steps that earlier processes began. wall_s: seconds of this process. Groups are counted over the whole run.
    """
    totals, ledger, config = session.monitor.totals, session.ledger, session.config
    start = session.weights
    counts, evaluations, last = ledger.counts(), ledger.evaluations(), ledger.last_step()
    return {
        "accuracy_before": evaluations[0].accuracy if evaluations else None,
        "accuracy_after": evaluations[-1].accuracy if evaluations else None,
        "held_out": evaluations[-1].n if evaluations else None,
        "held_out_before": evaluations[0].n if evaluations else None,
        "held_out_unscored": {"attempts": unscored_in(evaluations[-1].metrics), "reason": totals.unscored}
        if evaluations
        else None,
        "held_out_given": _offline(evaluations),
        "unlearned": unlearned(evaluations),
        "unearned": unearned(ledger, config, totals.cut),
        "steps": 0 if last is None else last + 1,
        "steps_before": before,
        "wall_s": round(wall_s, 2),
        "warmup_s": round(start.warmed.seconds, 2) if start and start.warmed else 0.0,
        "warmup_cached": bool(start and start.cached),
        "tokens_sampled": totals.tokens,
        "engine_tokens": engine_tokens(totals),
        "max_lag_allowed": config.max_lag,
        "max_lag_seen": totals.max_lag,
        "lags": {str(lag): n for lag, n in sorted(totals.lags.items())},
        "groups": counts.figures(),
        **attempts(totals),
        **({"sandbox": levels} if (levels := sandboxes_of(session.environment)) else {}),
        "cut_off": [
            {"by": kind, "tokens": tokens, "attempts": n} for (kind, tokens), n in totals.cut.most_common(MOST_CUTS)
        ],
        **_mismatch(totals),
        "versions_published": totals.versions,
        "published_mb": published_mb(totals),
        "memory_mb": {name: round(peak / 2**20, 1) for name, peak in totals.memory.items()},
        **_time(totals.time, totals.tokens),
        "advice": advice(totals, session.plan, session.model.architecture),
        "engine_share": engine_share(session.monitor.engines, totals, session.plan, session.model.architecture),
        "warnings": dict(totals.symptoms.told),
        **({"policies": [*config.trained_policies]} if config.policies else {}),
    }


def published_mb(totals: Totals) -> dict[str, float]:
    """Megabytes that the present trainer published, and those of the same versions in full."""
    done = next((done for done in totals.counters.values() if "published_bytes" in done), {})
    kinds = {"sent": "published_bytes", "whole": "published_whole_bytes"}
    return {kind: round(done.get(counter, 0.0) / 1e6, 3) for kind, counter in kinds.items()}


def _mismatch(totals: Totals) -> dict[str, Any]:
    """Gaps between the trainer's and the engines' logprobs, in nats: under the same weights, and under older ones."""
    matched, lagged = totals.matched.metrics(), totals.mismatch.lagged.metrics()
    return {
        "mismatch_lag0": {
            "mean": matched["logprob_gap"],
            "p99": matched["logprob_gap_p99"],
            "max": matched["logprob_gap_max"],
            "tokens": int(matched["tokens"]),
            "of_which_probed": totals.probe.tokens,
        },
        "staleness": {"mean": lagged["logprob_gap"], "p99": lagged["logprob_gap_p99"], "tokens": int(lagged["tokens"])},
    }


def _offline(evaluations: Sequence[EvalRecord]) -> dict[str, dict[str, float]] | None:
    """The first and the last held-out metrics of offline replies, or None if none are learnt."""
    names = ("loss", *FIGURES)
    found = [{name: e.metrics[name] for name in names if name in e.metrics} for e in (*evaluations[:1], *evaluations[-1:])]
    return {"before": found[0], "after": found[1]} if found and all(found) else None


def unlearned(evaluations: Sequence[EvalRecord]) -> dict[str, Any] | None:
    """The first and the last accuracy if it fell by more than chance explains, else None."""
    if not evaluations:
        return None
    first, last = evaluations[0], evaluations[-1]
    if first.accuracy is None or last.accuracy is None or not first.n or not last.n:
        return None
    errors = errors_apart(first.accuracy, first.n, last.accuracy, last.n)
    if errors <= CLEARLY:
        return None
    accuracies = {"before": first.accuracy, "after": last.accuracy, "n_before": first.n, "n_after": last.n}
    return {**accuracies, "errors": round(errors, 2), "unjudged": unscored_in(last.metrics)}


def advice(totals: Totals, plan: RunPlan, policy: Architecture) -> dict[str, Any] | None:
    """The one change that would help most, judged by measurements, or None."""
    found = advise(totals.time, _setup(totals, plan, policy))
    if found is None:
        return None
    return {"cause": found.cause, "share": round(found.share, 4), "at_most": round(found.gain, 2), "text": str(found)}


def engine_share(
    engines: EngineUse, totals: Totals, plan: RunPlan, policy: Architecture, older_s: float = 0.0
) -> dict[str, Any] | None:
    """The engines' share of the time beside what list scheduling allows, or None: see `EngineUse.share`."""
    found = engines.share(plan.episodes, older_s)
    if found is None:
        return None
    figures = {name: round(value, 4) for name, value in asdict(found).items()}
    text = advise_engines(found, totals.time, _setup(totals, plan, policy))
    return {**figures, "of_allowed": round(found.of_allowed, 4), "text": text}


def _setup(totals: Totals, plan: RunPlan, policy: Architecture) -> Setup:
    config, placement = plan.config, plan.config.placement
    return Setup(
        max_lag=config.max_lag,
        slots=plan.slots,
        window=config.rollout.window,
        engines=placement.engines * config.engine_pools,
        engine_threads=placement.engine_threads,
        engine_step=tokens_per_step(totals) * parameters(policy),
        trainer_threads=placement.trainer_threads,
        workers=config.scoring.workers,
        cores=usable_cores(),
        shared=plan.shares_cores,
        paused=totals.paused_s / max(sum(totals.time.seconds.get(TRAINER, {}).values()), 1e-9),
        failed=totals.paused_for,
    )


def tokens_per_step(totals: Totals) -> float:
    """Mean tokens in an engine step; 0 if no engine reported any."""
    tokens, steps = engine_tokens(totals), sum(done["steps"] for done in _engines(totals))
    return (tokens["generated"] + tokens["prompt"] - tokens["cached"]) / max(steps, 1)


def engine_tokens(totals: Totals) -> dict[str, int]:
    """Tokens that the present engines sampled for steps, were given as prompts, and found in their prefix caches."""
    return {
        kind: int(sum(done[f"{kind}_tokens"] for done in _engines(totals))) for kind in ("generated", "prompt", "cached")
    }


def _engines(totals: Totals) -> list[Metrics]:
    return [done for name, done in totals.counters.items() if done.get("steps") and not name.startswith(REFERENCE)]


def attempts(totals: Totals) -> dict[str, Any]:
    """This process's attempts so far: how they were judged, and what their tools, gateways and agents counted."""
    refused = next((why for why, _ in totals.refusals.most_common(1)), "")
    return {"judging": judging(totals), "counts": counts_in(totals.counts), "refused": refused}


def judging(totals: Totals) -> dict[str, Any]:
    """Counts of this process's attempts with and without a score, the commonest reasons, and pauses."""
    counts = {kind: totals.outcomes[kind] for kind in ("scored", "unscorable", "infra_errors")}
    reasons = dict(totals.reasons.most_common(5))
    return {**counts, "reasons": reasons, "pauses": totals.pauses, "paused_s": round(totals.paused_s, 1)}


def _time(spent: Account, tokens: int) -> dict[str, Any]:
    wall = spent.wall.get(CONTROLLER, 0.0)
    shares = spent.overall() | {"reward": spent.judged / wall} if wall else {}
    return {
        "train_s": round(wall, 2),
        "tokens_per_s": round(tokens / wall, 1) if wall else 0.0,
        "time": {kind: round(share, 4) for kind, share in shares.items()},
        "overlap": round(spent.both / wall, 4) if wall else 0.0,
        "time_by_process": {
            name: {kind: round(share, 4) for kind, share in kinds.items() if share >= 0.00005}
            for name, kinds in spent.shares().items()
        },
    }


def finals(report: Mapping[str, Any], folder: Path) -> list[Path]:
    """The folders of a complete run's models: one of each policy, if it had several."""
    final = folder / "final"
    return [final / name for name in report.get("policies", ())] or [final]


def unscored_of(report: Mapping[str, Any]) -> str:
    """The words after the last held-out accuracy if attempts have no score, else nothing."""
    found = report.get("held_out_unscored")  # an older run's report has none
    return without_score(found["attempts"], found["reason"]) if found else ""


def in_lines(report: Mapping[str, Any], folder: Path, complete: bool) -> list[str]:
    """A run in a few lines: its steps, its results, its model, and what to do next."""
    before, after, n = report.get("accuracy_before"), report.get("accuracy_after"), report.get("held_out")
    lines = [f"run {folder}: {amount(report['steps'], 'step')}, {'done' if complete else 'stopped; the same call goes on'}"]
    if after is not None and n:
        low, high = interval(after, n)
        begun = "" if before is None else f"{before:.3f} -> "
        interval_said = f"(95 % CI {low:.3f} to {high:.3f}){unscored_of(report)}"
        lines.append(f"held-out accuracy {begun}{after:.3f} on {amount(n, 'task')} {interval_said}")
    if given := report.get("held_out_given"):
        known = [(name, was, given["after"].get(name)) for name, was in given["before"].items()]
        changes = [f"{name.replace('_', ' ')} {was:.3f} -> {now:.3f}" for name, was, now in known if now is not None]
        lines.append(f"held-out {', '.join(changes)}")
    if fell := report.get("unlearned"):
        lines.append(f"it unlearned: by {fell['errors']:.1f} standard errors of the difference")
    if complete:
        lines += [f"model: {each} (Hugging Face), .final here" for each in finals(report, folder)]
    served = finals(report, folder)[0] if report.get("policies") else folder
    lines.append(f"next: tidemill samples {folder} --worst 3" + (f"  ·  tidemill serve {served}" if complete else ""))
    return lines
