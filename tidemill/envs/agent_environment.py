"""Environment whose agent is a user's program, which finds the policy by the address and key of a gateway."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from tidemill.core.chat_interface import Chat
from tidemill.core.errors import ConfigError
from tidemill.core.import_object import load_object
from tidemill.core.interfaces import Gold
from tidemill.core.types import InfraError, Outcome, Task, Trajectory, Unscorable
from tidemill.envs.agent_player import PLAYERS, AgentPlayer, play_task
from tidemill.envs.environment import gold_of, is_grouped
from tidemill.envs.environment_settings import NO_REWARD, AgentSettings, RowsSettings
from tidemill.envs.python_tasks import splits_of
from tidemill.envs.reward_list import judge_of
from tidemill.envs.reward_workers.reward_pool import RewardPool
from tidemill.envs.task_files import row_splits
from tidemill.envs.tasks import check_splits, columns_of
from tidemill.gateway.gateway import expect_packages

PYTHON = ("python", "python3")  # in a command: the interpreter of this environment


class AgentEnvironment:
    """Environment of kind "agent": a program plays, and scores the attempt itself or leaves that to rewards."""

    def __init__(self, settings: AgentSettings, pool: RewardPool) -> None:
        """Raises ConfigError when the command, the tasks or the rewards cannot be used, or a package is missing."""
        expect_packages()
        self.settings, self.command = settings, command_of(settings.command)
        script = next((word for word in self.command[1:] if not word.startswith("-")), self.command[0])
        self.name = Path(script if Path(script).is_file() else self.command[0]).stem
        rows = {"data", "eval_data", "eval_share", "reward", "reward_weights", "reward_options"}
        as_rows = RowsSettings(**settings.model_dump(include=rows))
        if settings.data.rpartition(":")[0].endswith(".py"):
            self._splits = splits_of(load_object(settings.data), self.name, settings.eval_share)
        else:
            self._splits = row_splits(as_rows)
        check_splits(self.name, self._splits)
        self._judge = None
        if settings.reward not in NO_REWARD:
            self._judge = judge_of(as_rows.reward, pool, weights=as_rows.reward_weights, options=as_rows.reward_options)
            self._judge.check(columns_of([*self._splits["train"], *self._splits["eval"]]))
        self._player: AgentPlayer | None = None

    @property
    def notes(self) -> list[str]:
        """Sentences that the user should read before a run begins."""
        return list(getattr(self._judge, "notes", ()))

    @property
    def judged(self) -> bool:
        """True if rewards decide on the attempts, and not the program."""
        return self._judge is not None

    def tasks(self, split: str) -> Sequence[Task]:
        return self._splits[split]

    @property
    def grouped(self) -> bool:
        return self._judge is not None and is_grouped(self._judge)

    def gold(self, task: Task) -> Gold:
        if self._judge is None:
            return Unscorable("the agent itself gives the scores")
        return gold_of(self._judge, task, "its judge")

    async def run(self, task: Task, chat: Chat) -> Outcome | None:
        """Play an episode from this process: see `agent_workers` for the usual way."""
        if self._player is None:
            self._player = PLAYERS[self.settings.lifetime](self.command, self.settings.limit_s, self.judged)
        return await play_task(self._player, task, chat)

    async def judge(self, task: Task, attempts: list[Trajectory]) -> list[Outcome]:
        if self._judge is None:
            return [InfraError(f"agent {self.name} left the attempt undecided")] * len(attempts)
        return await self._judge(task, attempts)

    async def close(self) -> None:
        if self._player is not None:
            await self._player.close()


def command_of(text: str) -> list[str]:
    """The words of a command, whose program exists. Raises ConfigError."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"env.command = {text!r:.200} cannot be read: {error}") from None
    if not words:
        raise ConfigError("env.command is empty: give the command that plays an episode, such as 'python agent.py'")
    if words[0] in PYTHON:
        words[0] = sys.executable
        if (script := next((word for word in words[1:2] if word.endswith(".py")), None)) and not Path(script).is_file():
            raise ConfigError(f"env.command: file {script!r} does not exist in {Path.cwd()}")
    if shutil.which(words[0]) is None:
        raise ConfigError(f"env.command: there is no program {words[0]!r}: give its path, or 'python FILE.py'")
    return words
