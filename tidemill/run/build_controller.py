"""Construction of a session's controller, at the point where the run stands."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from tidemill.algorithms.mixture import Mixture, algorithm_of
from tidemill.algorithms.policy_algorithms import PolicyAlgorithms, algorithm_of_policies
from tidemill.algorithms.prepare_step import ConfiguredAlgorithm
from tidemill.controller.admission_buffer import Buffer
from tidemill.controller.circuit_breaker import Breaker, Change, Gate
from tidemill.controller.controller import Controller, Hooks, Schedule
from tidemill.controller.device_turns import DeviceTurns
from tidemill.controller.engine_pool import PoolPublisher
from tidemill.controller.evaluation import Evaluator
from tidemill.controller.offline_groups import HeldOut, OfflineRoller
from tidemill.controller.policy_check import Agreement
from tidemill.controller.rollout import EpisodeSetup, Rollout
from tidemill.controller.sampling_check import check_sampling
from tidemill.controller.schedule import nothing
from tidemill.core.interfaces import Algorithm, Environment, Ledger, Roller
from tidemill.core.types import Array, Completion, GenerateRequest, Metrics, Sample, SamplingParams, Version
from tidemill.observability.time_breakdown import EVALUATE
from tidemill.run.cluster import Cluster
from tidemill.run.deterministic_resume import Recorded, take_up_exactly
from tidemill.run.planner.plan import RunPlan
from tidemill.run.recipe import RunConfig
from tidemill.run.resume import Reached, ResumePoint, take_up
from tidemill.run.storage.checkpoint_manifest import Position
from tidemill.run.storage.checkpoints import Checkpoints
from tidemill.run.storage.model_folder import ModelFolder
from tidemill.run.task_source import Experience, curriculum_of, giving, remembered
from tidemill.run.trainer_restart import TrainerRestart

if TYPE_CHECKING:
    from tidemill.run.session import Session

Evaluation = Callable[[Sequence[Version]], Awaitable[Metrics]]
"""Evaluates the served versions, one of each policy. Raises PolicyMismatch when another version answers."""


def make_algorithm(config: RunConfig) -> ConfiguredAlgorithm | Mixture | PolicyAlgorithms:
    """The recipe's algorithm. Raises ValueError for functions that cannot be loaded."""
    if config.policies:
        return algorithm_of_policies(config.policy_algorithms, config.policy_of, config.rollout.max_tokens)
    return algorithm_of(config.algorithms, config.rollout.max_tokens)


def make_episodes(
    config: RunConfig, environment: Environment, model: ModelFolder, frozen: Mapping[str, Version] | None = None
) -> EpisodeSetup:
    """The recipe's episodes with this model; training and every evaluation share them.

    frozen: the versions that are served of the policies that environments may ask.
    """
    r = config.rollout
    params = SamplingParams(r.temperature, r.top_p, r.top_k, r.min_p, r.max_tokens, model.stop_ids)
    known = model.architecture
    context = config.engine.context_of(known.context)
    asked = {"policies": config.policy_of, "frozen": frozen or {}}
    return EpisodeSetup(environment, model.tokenizer, params, context, r.episode_s, known.vocab, **asked)


async def build_controller(session: Session, cluster: Cluster) -> Controller:
    """Bring the trainer to where the run stands, and put the controller together that goes on from there."""
    config, ledger, plan = session.config, session.ledger, session.plan
    algorithm, policies = make_algorithm(config), config.trained_policies
    checkpoints = _checkpoints(session)
    context = min(pool.context for pool in cluster.pools.values())  # shorter if a KV cache is small
    slept, made = cluster.pool.slept_s, make_episodes(config, session.environment, session.model, session.frozen)
    noted = {"paused_s": slept, "times": session.monitor.engines.times, "refused": session.monitor.refused}
    episodes = replace(made, context=context, extras=session.extras, **noted)
    roller, held_out = _roller(session, cluster, episodes, algorithm)
    publisher = PoolPublisher(
        cluster.trainer,
        cluster.pool,
        lambda version, why: session.record_event("weights_unchanged", {"version": str(version), "why": why}),
    )
    first = "" if ledger.next_group_id() else "held-out tasks"  # what has begun was judged
    evaluator = Evaluator(cluster.pool, episodes, config.seed, session.monitor.unscored, first)
    evaluate = _evaluation(session, evaluator, held_out)
    point, exact = await _taken_up(session, cluster, checkpoints, algorithm, publisher, evaluate)
    recorded = Recorded(ledger, roller) if exact else None
    restart = TrainerRestart(
        *(cluster.process, cluster.trainer, cluster.pool, ledger, checkpoints, algorithm, point, exact),
        partial(session.begin_again, "the trainer"),
        session.note,
        policies,
    )
    if session.curriculum is None:  # from here on it is told of everything
        session.curriculum = remembered(curriculum_of(config, session.environment), ledger)
    curriculum, devices = session.curriculum, plan.devices.metrics()
    session.monitor.attach(cluster.trainer, [*cluster.pools.values()], lambda: {**curriculum.figures(), **devices})
    return Controller(
        _schedule(plan, point),
        _buffer(plan, point),
        giving(session.curriculum),
        recorded or roller,
        cluster.trainer,
        publisher,
        cast(Ledger, recorded or ledger),
        algorithm,
        session.monitor,
        _hooks(session, cluster, checkpoints, evaluate, point, restart),
        gate=_gate(session),
        restored=point.left,
        policies=policies,
        versions=point.versions,
        learn=session.curriculum.learn_group,
        turns=cluster.turns,
        again=Experience(ledger, config.data.replay, plan.replayed),
        timeline=session.monitor.loop,
    )


async def _taken_up(
    session: Session,
    cluster: Cluster,
    checkpoints: Checkpoints,
    algorithm: ConfiguredAlgorithm | Mixture | PolicyAlgorithms,
    publisher: PoolPublisher,
    evaluate: Evaluation,
) -> tuple[ResumePoint, bool]:
    """Bring the trainer to where the run stands. True: exactly, so that recorded groups are given out once more."""
    config, ledger, note = session.config, session.ledger, session.note
    algorithm.recall(ledger.metrics_of, note)
    await cluster.turns.trainer()  # it may train steps again
    exact = await take_up_exactly(ledger, checkpoints, cluster.trainer, note) if config.deterministic else None
    point = exact
    if point is None:
        reached = _made_up(session, cluster.turns, publisher, evaluate)
        point = await take_up(ledger, checkpoints, cluster.trainer, algorithm, note, reached, config.trained_policies)
    for version in session.frozen.values():
        ledger.publish(version)
    if ledger.next_group_id() > 0:
        note(f"going on from step {point.step} of {config.steps}")
        if known := ledger.evaluations():
            session.monitor.remember(known[-1].metrics)
    return point, exact is not None


def _roller(
    session: Session, cluster: Cluster, episodes: EpisodeSetup, algorithm: Algorithm
) -> tuple[Roller, HeldOut | None]:
    config = session.config
    if config.offline:
        offline = OfflineRoller(config.offline, session.model.tokenizer)
        return offline, HeldOut(cluster.trainer, algorithm, offline)
    size, greedy = config.rollout.group_size, any(each.wants_greedy for each in config.algorithms.values())
    return Rollout(cluster.pool, episodes, size, config.seed, session.monitor.beside, greedy), None


def _checkpoints(session: Session) -> Checkpoints:
    record, replay = session.config.record, session.config.data.replay
    kept = {"keep": record.checkpoints, "keep_every": record.keep_every, "replays": replay.within if replay.share else 0}
    return Checkpoints(session.folder.checkpoints, session.ledger, session.note, **kept)


def position(controller: Controller, steps: int) -> dict[str, Any]:
    buffer = controller.buffer
    versions = [version.step for version in controller.versions.values()]
    slots = {"slots": buffer.slots, "used": buffer.used, "finished": buffer.ready}
    return {"step": controller.step, "steps": steps, "version": max(versions, default=None), "buffer": slots}


def _gate(session: Session) -> Gate:
    scoring = session.config.scoring

    def tell(change: Change) -> None:
        session.monitor.judging(change)
        if change.kind == "tried":
            return
        paused = {"share": change.share, "reason": change.reason}
        detail = {"verifier": change.verifier, **(paused if change.kind == "paused" else {"seconds": change.seconds})}
        session.ledger.event(f"judging_{change.kind}", detail)

    return Gate(Breaker(scoring.max_error_share, scoring.pause_s), session.environment.name, tell)


def _schedule(plan: RunPlan, point: ResumePoint) -> Schedule:
    config = plan.config
    return Schedule(
        steps=config.steps,
        first=point.step,
        saved=point.saved,
        incarnation=point.incarnation,
        eval_every=plan.eval_every,
        checkpoint_every=config.record.checkpoint_every,
        probe_every=config.record.probe_every,
        deterministic=config.deterministic,
        stream=config.trainer.micro_batch_tokens if plan.streams else 0,
    )


def _buffer(plan: RunPlan, point: ResumePoint) -> Buffer:
    config, rollout = plan.config, plan.config.rollout
    return Buffer(
        batch=rollout.groups,
        max_lag=config.max_lag,
        window=rollout.window,
        total=(config.steps - point.step) * rollout.groups,
        next_id=point.next_id,
        live=point.live,
    )


def _evaluation(session: Session, evaluator: Evaluator, held_out: HeldOut | None) -> Evaluation:
    """The evaluation of published versions.

    Engines attempt tasks with a reward greedily. The trainer computes metrics of offline replies: its weights do not move
    before the publication has ended.
    """
    config = session.config

    async def evaluate(served: Sequence[Version]) -> Metrics:
        step = served[0].step
        ends = step in (0, config.steps)
        tasks = session.environment.tasks("eval")[: config.eval.final_tasks if ends else config.eval.tasks]
        with session.monitor.beside.span(EVALUATE, step=step):
            results = await evaluator(tasks, served) if config.judged else Metrics()
            return results | (await held_out(tasks) if held_out else Metrics())

    return evaluate


def _made_up(session: Session, turns: DeviceTurns, publisher: PoolPublisher, evaluate: Evaluation) -> Reached:
    """The evaluation of versions that are trained again, if a crash kept it from finishing."""
    evaluated = {each.step for each in session.ledger.evaluations()}

    async def reached(step: int, incarnation: int) -> None:
        if step in evaluated or step % session.plan.eval_every:
            return
        served = list[Version]()
        for policy in session.config.trained_policies:
            served.append(await publisher.publish(Version(step, incarnation, policy)))
            session.ledger.publish(served[-1])
        async with turns.lent():
            results = await evaluate(served)
        session.ledger.evaluation(step, results)
        session.monitor.evaluated(step, results)

    return reached


def _hooks(
    session: Session,
    cluster: Cluster,
    checkpoints: Checkpoints,
    evaluate: Evaluation,
    point: ResumePoint,
    restart: TrainerRestart,
) -> Hooks:
    async def checkpoint(step: int, next_id: int) -> Coroutine[Any, Any, None]:
        return await checkpoints.begin(cluster.trainer, Position(step, point.incarnation, next_id))

    agreement = Agreement(cluster.trainer, session.plan.coarsest)

    async def probe(version: Version, samples: Sequence[Sample], logprobs: Sequence[Array]) -> None:
        if all(can.scores(session.config.rollout.temperature) for can in cluster.capabilities):
            agreement.check_probe(version, await session.monitor.probe(version, samples, logprobs, cluster.pool))

    again = restart if session.config.supervise.resume else None
    served = _sampling_check(session, cluster)
    return Hooks(evaluate, checkpoint, agreement, probe, cluster.process.ends, again, served)


def _sampling_check(session: Session, cluster: Cluster) -> Callable[[Sequence[Version]], Awaitable[None]]:
    """The check of what engines sample with the first versions, if the recipe has settings that may change it."""
    config, model = session.config, session.model.architecture
    if not (names := config.engine.altering) or config.offline:
        return nothing
    left = [make_episodes(config, session.environment, session.model).params]

    async def generate(request: GenerateRequest) -> Completion:
        return await cluster.pool.run(lambda engine: engine.generate(request))

    async def forward(samples: list[Sample]) -> list[Array]:
        async with cluster.turns.borrowed():
            return await cluster.trainer.forward(samples)

    async def served(versions: Sequence[Version]) -> None:
        if not left:
            return
        for version in versions:
            asked = left[0], model.vocab, version, session.plan.coarsest, names
            context = min(can.context for can in cluster.capabilities)
            report = await check_sampling(generate, forward, *asked, context=context)
            session.record_event("sampling_checked", {"settings": names, **report.detail()})
        left.clear()  # only now: the trainer may be lost meanwhile

    return served


@contextmanager
def end_on_sigterm(note: Callable[[str], None]) -> Iterator[None]:
    """End the run on the first SIGTERM while it starts, as Ctrl-C does: without this it would end without a word."""
    if threading.current_thread() is not threading.main_thread():  # in another thread the caller handles signals
        yield
        return
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def handle() -> None:
        loop.remove_signal_handler(signal.SIGTERM)  # another one ends the process as it is
        note("SIGTERM: the run ends now, for no step is under way (the same command goes on later)")
        task.cancel("SIGTERM")

    loop.add_signal_handler(signal.SIGTERM, handle)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


@asynccontextmanager
async def stop_on_signals(session: Session, stop: Callable[[], None]) -> AsyncIterator[None]:
    """Stop the run on Ctrl-C or SIGTERM: first after its step, then at once.

    A signal that came before the trainer was lost still counts.
    """
    if threading.current_thread() is not threading.main_thread():  # in another thread the caller handles signals
        yield
        return
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def handle(name: str) -> None:
        if session.stopping:
            task.cancel(f"{name} again")
            return
        session.stopping = True
        session.note(f"{name}: the run ends after this step; once more stops it now (the same command goes on later)")
        stop()

    if session.stopping:
        stop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, handle, number.name)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
