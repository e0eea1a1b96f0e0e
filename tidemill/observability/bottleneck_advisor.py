"""Bottleneck advice: the one change that would speed up a run most.

    the trainer works nearly always               -> the trainer is the bottleneck
    it waits for rollouts, engines wait for it    -> they take turns: more lag lets them overlap
    ...               while engines compute       -> the engines; or, with few groups in flight, the longest episodes
    ...               while engines wait for verifiers or environments -> the verifiers or environments
    it waits for engines, an evaluation, ...      -> the one that it waits for
    nothing was admitted, because judging failed  -> the cause of that failure, before all else

The gain is an upper bound: the time that is left when this wait ends and no other takes its place.

A second advice is on engines whose episodes are often outside of them, in tools or with agents: see `engine_share`.

    engines are about as busy as they could be    -> more episodes in flight, or faster tools
    less busy, and few episodes are in flight     -> those that have ended hold places: more lag, a window, smaller groups
    less busy, and many are in flight             -> what engines do besides, or their queue
"""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.observability.engine_share import EngineShare
from tidemill.observability.time_breakdown import CONTROLLER, REFERENCE, TRAINER, WAIT, Account

LITTLE = 0.1  # share of the time below which a wait is ignored
FEW = 0.2  # share of the groups that may be in flight
ENOUGH = 0.85  # of what list scheduling allows, and of the time
# Multiplications in an engine's step above which more threads may help. Threads meet within a step, so another process on
# one of their cores (the controller, a verifier) delays all of them. Measured: with steps of 0.15e9 (the demo) a run took
# 38 s with two threads and 25 s with one; with 0.4e9, the two took equally long.
WORTH_THREADS = 1e9


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings of a run that the advice depends on."""

    max_lag: int
    slots: int  # groups that may be in flight
    window: int = 1  # of ids from which a step takes its groups
    engines: int = 1
    engine_threads: int = 1
    engine_step: float = 0.0  # multiplications, on average; 0: not known
    trainer_threads: int = 1
    workers: int = 1  # of the scoring pool
    cores: int = 1
    paused: float = 0.0  # share of the time in which nothing was admitted, because judging failed
    failed: str = ""  # the reason of the latest failure
    shared: bool = False  # trainer and engines may be given more threads than there are cores


@dataclass(frozen=True, slots=True)
class Advice:
    cause: str  # judging, trainer, engines, straggler, turns, reward, environment, sync, evaluation, reference, ledger, ...
    share: float  # share of the run's time
    text: str

    @property
    def gain(self) -> float:
        """Upper bound of the speed-up, as a factor."""
        return 1 / max(1 - self.share, 0.05)

    def __str__(self) -> str:
        return f"{self.text} (at most {self.gain:.1f} x as fast)" if self.cause != TRAINER else self.text


def advise(found: Account, setup: Setup) -> Advice | None:
    """The advice for a run; None when the trainer recorded no time."""
    trainer = found.shares().get(TRAINER)
    if not trainer or sum(found.seconds[TRAINER].values()) <= 0:
        return None
    if setup.paused >= LITTLE:
        what = f"nothing was admitted {setup.paused:.0%} of the time, because judging failed: {setup.failed}"
        return Advice("judging", setup.paused, f"{what}; mend that first")
    waits = {key.removeprefix(WAIT): share for key, share in trainer.items() if key.startswith(WAIT)}
    whom = max(waits, key=waits.__getitem__, default="")
    share = waits.get(whom, 0.0)
    if share < LITTLE:
        return Advice(TRAINER, trainer["train"], _trainer(trainer["train"], sum(waits.values()), setup))
    if whom != "rollouts":
        return Advice({"engines": "sync"}.get(whom, whom), share, _others(whom, share))
    return _starved(found, share, setup)


def _starved(found: Account, share: float, setup: Setup) -> Advice:
    total = max(sum(found.starved.values()), 1e-12)
    doing = {key: value / total for key, value in found.starved.items()}
    flying = found.in_flight / max(found.starved_s, 1e-12)
    what = f"the trainer waited for rollouts {share:.0%} of the time"
    slow = max(("reward", "environment"), key=lambda k: doing.get(WAIT + k, 0.0))
    others = (TRAINER, CONTROLLER, REFERENCE)
    engines = [k.get(WAIT + TRAINER, 0.0) for name, k in found.shares().items() if not name.startswith(others)]
    if engines and (both := min(share, sum(engines) / len(engines))) >= LITTLE:
        more = f"raise max_lag (now {setup.max_lag}), so that they work at the same time"
        return Advice("turns", both, f"{what}, and the engines for the trainer {sum(engines) / len(engines):.0%}: {more}")
    few = setup.slots >= 2 / FEW and flying < FEW * setup.slots
    left = f"{what}, with {flying:.1f} of {setup.slots} groups still under way"
    if doing.get("generate", 0.0) >= doing.get(WAIT + slow, 0.0):
        if few:
            return Advice("straggler", share, f"{left}: {_LONGEST}")
        computing = f"the engines computed {doing['generate']:.0%} of that"
        return Advice("engines", share, f"{what}, and {computing}: {_engines(setup)}")
    if few:
        return Advice("straggler", share, f"{left}, in the {slow}: {_LONGEST}")
    return Advice(slow, share, f"{what}, and the engines for the {slow}: {_slow(slow, setup)}")


_LONGEST = (
    "raise max_lag or rollout.window, so that others are trained meanwhile, or bound the longest (rollout.max_tokens, or "
    "the environment's own max_tokens)"
)


def _engines(setup: Setup) -> str:
    threads, small = setup.engine_threads, 0 < setup.engine_step < WORTH_THREADS
    used = setup.engines * threads + setup.trainer_threads
    if used < setup.cores:
        more = "placement.engines" if small else "placement.engines or placement.engine_threads"
        return f"{setup.cores - used} of {setup.cores} cores are free: raise {more}"
    if setup.shared and threads < setup.cores and not small:
        return f"raise placement.engine_threads (now {threads}): while the trainer waits, its cores are theirs"
    return "give the engines more of the machine, a lower precision (engine.dtype), or shorter replies" + (
        "; not more threads: their steps are too small for them" if small else ""
    )


def _slow(what: str, setup: Setup) -> str:
    if what == "reward":
        return f"raise scoring.workers (now {setup.workers}), or make the reward faster"
    return f"let more groups wait for it at a time: raise max_lag (now {setup.max_lag}) or placement.environment.workers"


def _trainer(share: float, waited: float, setup: Setup) -> str:
    free, threads = setup.cores - setup.engines * setup.engine_threads - setup.trainer_threads, setup.trainer_threads
    more = f"{free} cores are free: raise placement.trainer_threads" if free > 0 else "it is what this machine can train"
    if free <= 0 and setup.shared and threads < setup.cores:
        more = f"raise placement.trainer_threads (now {threads}): while the engines are idle, their cores are its"
    return f"the trainer computed {share:.0%} of the time, and waited {waited:.0%}, for nobody long: {more}"


def _others(whom: str, share: float) -> str:
    what = f"the trainer waited for {'an ' if whom == 'evaluation' else 'the '}{whom} {share:.0%} of the time: "
    change = {
        "engines": "they took weights up or were checked: publish less often (more groups a step), record.probe_every",
        "reference": "raise placement.reference_engines or placement.engine_threads",
        "evaluation": "raise eval.every, or lower eval.tasks",
        "ledger": "put run_dir on a faster local disk",
    }
    return what + change.get(whom, "it has too much to do beside: fewer, longer groups a step, less recorded")


def advise_engines(found: EngineShare, time: Account, setup: Setup) -> str:
    """Sentences on engines whose episodes are often outside: how busy they were, how busy they could be, what to change."""
    waits = f"between turns: median {found.outside_median_s:.2g} s, 99 % within {found.outside_p99_s:.2g} s"
    return (
        f"engines computed {found.busy:.0%} of the time; episodes were outside of them for {found.outside:.0%} of theirs "
        f"({waits}). With at most {found.places:,} of these episodes in flight, list scheduling would have let them compute "
        f"{found.allowed:.0%}: they reached {found.of_allowed:.0%} of that. {_more_of(found, time, setup)}"
    )


def _more_of(found: EngineShare, time: Account, setup: Setup) -> str:
    """The change that would have engines compute for more of the time, and its reason."""
    if found.of_allowed >= ENOUGH:
        if found.allowed >= ENOUGH:
            return "Nothing is to be gained here"
        return (
            f"The gap is small. Only more episodes in flight keep engines busier: raise max_lag (now {setup.max_lag}) or "
            "rollout.groups; or make the tools faster"
        )
    return f"The gap is large: {_cause_of_gap(found, time, setup)}"


def _cause_of_gap(found: EngineShare, time: Account, setup: Setup) -> str:
    if found.busy >= ENOUGH * found.allowed_in_flight:
        flying = f"on average {found.in_flight:.0f} episodes were in flight"
        ended = f"{flying}. The other places were held by episodes that had ended and"
        if (trains := time.shares().get(TRAINER, {}).get("train", 0.0)) >= ENOUGH:
            return f"{ended} waited for the trainer, which computed {trains:.0%} of the time"
        wait = f"Raise max_lag (now {setup.max_lag}) or rollout.window (now {setup.window}), or have smaller groups"
        return f"{ended} waited for their siblings, their judgement or the trainer. {wait}"
    if found.queued >= LITTLE:
        return f"episodes waited {found.queued:.0%} of their time in the engines' queues. Raise engine.max_sequences"
    others = (TRAINER, CONTROLLER, REFERENCE)
    engines = [kinds for name, kinds in time.shares().items() if not name.startswith(others)]
    besides = {
        "sync": "taking up weights",
        "yield": "taking in and answering calls",
        "asleep": "asleep",
    }
    spent = {kind: sum(kinds.get(kind, 0.0) for kinds in engines) / max(len(engines), 1) for kind in besides}
    most = max(spent, key=spent.__getitem__)
    return f"beside computing, engines spent most time on {besides[most]} ({spent[most]:.0%}). {_CHANGES[most]}"


_CHANGES = {
    "sync": "Publish less often (more groups a step)",
    "yield": "Ask for longer replies, or fewer of them",
    "asleep": "Give the trainer a device of its own (placement.share)",
}
