"""Agents in the environment's worker processes: programs and gateways there, tasks and rewards here."""

from __future__ import annotations

from tidemill.core.types import Outcome, Task, Trajectory
from tidemill.envs import episode_protocol as wire
from tidemill.envs.agent_environment import AgentEnvironment
from tidemill.envs.agent_worker import LoadAgent
from tidemill.envs.environment_settings import WORKERS, EnvironmentWorkers
from tidemill.envs.episode_workers import WorkerEnvironment
from tidemill.runtime.workers.worker import WorkerKind
from tidemill.runtime.workers.worker_pool import Lost, WorkerPool

_MODULE = "tidemill.envs.agent_worker"


class AgentWorkers(WorkerEnvironment):
    """The environment of an agent whose episodes run in worker processes."""

    def __init__(self, inner: AgentEnvironment, settings: EnvironmentWorkers, lost: Lost) -> None:
        self.name, self._inner = inner.name, inner
        kind = WorkerKind(
            _MODULE,
            f"the worker of agent {self.name}",
            results=wire.EpisodeResult,
            notes=wire.EpisodeNote,
            memory_mb=settings.memory_mb,
            most=wire.MAX_FRAME,
            patience_s=settings.limit_s,
        )
        own = inner.settings
        load = LoadAgent(self.name, inner.command, own.lifetime, own.limit_s, inner.judged)
        self.pool = WorkerPool(kind, settings.workers or WORKERS, preload=load, lost=lost)

    async def judge(self, task: Task, attempts: list[Trajectory]) -> list[Outcome]:
        return await self._inner.judge(task, attempts)
