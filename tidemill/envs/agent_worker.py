"""Worker process that plays episodes by a user's program: gateways for it, and the program itself below.

python -m tidemill.envs.agent_worker MEMORY_MB PARENT
"""

from __future__ import annotations

from typing import cast

import msgspec

from tidemill.core.chat_interface import Chat
from tidemill.core.interfaces import Environment
from tidemill.core.types import Outcome, Task
from tidemill.envs import episode_protocol as wire
from tidemill.envs.agent_player import PLAYERS, AgentPlayer, play_task
from tidemill.envs.episode_worker import EpisodeHandler
from tidemill.runtime.workers import serve_tasks
from tidemill.runtime.workers.worker_setup import Channel


class LoadAgent(msgspec.Struct, frozen=True, tag=True):
    """First message: the program to play with."""

    name: str  # in messages
    command: list[str]
    lifetime: str
    limit_s: float
    judged: bool


class PlayedEnvironment:
    """The part of an environment that this process has: its episodes."""

    def __init__(self, player: AgentPlayer) -> None:
        self._player = player

    async def run(self, task: Task, chat: Chat) -> Outcome | None:
        return await play_task(self._player, task, chat)


class AgentHandler(EpisodeHandler):
    """`worker_setup.Handler` of an agent's worker."""

    requests = LoadAgent | wire.Begin

    def load(self, request: LoadAgent | wire.EpisodeRequest) -> None:
        if isinstance(request, LoadAgent):
            player = PLAYERS[request.lifetime](request.command, request.limit_s, request.judged)
            self._environment = cast(Environment, PlayedEnvironment(player))  # only episodes are asked of it here
            self._name = f"agent {request.name}"

    async def call(self, request: LoadAgent | wire.EpisodeRequest, channel: Channel) -> wire.EpisodeResult:
        return None if isinstance(request, LoadAgent) else await super().call(request, channel)


if __name__ == "__main__":
    serve_tasks.serve(AgentHandler(), wire.MAX_FRAME)
