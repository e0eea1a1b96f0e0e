"""One small run for all tests of commands: two turns an episode, and a reward that every sampled character decides."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from tidemill.cli.main import app
from tidemill.core.errors import ConfigError

ENVIRONMENT = '''
from zlib import crc32

from tidemill.envs.environment import environment
from tidemill.core.types import Score


def rows(split):
    return [{"prompt": f"{split} {i}", "answer": f"a{i}"} for i in range(40 if split == "eval" else 20)]


@environment(tasks=rows)
async def checksum(task, chat):
    """By a checksum of all that was said: one token more or less, or another one, changes the figures."""
    said = await chat.reply(task.prompt) + await chat.reply("again")
    drawn = crc32((task.prompt + said).encode())
    return Score(1.0 if drawn % 2 else drawn % 1000 / 1001)


@environment(tasks=rows)
async def broken(task, chat):
    await chat.reply(task.prompt)
    if task.prompt.endswith("7"):
        raise RuntimeError("the \\x1b[31msandbox is gone")
    return Score(1.0)
'''


CONVERSED = """

HOSTILE = "be brief \\x1b[2J\\x1b]0;owned\\x07\\u202e"


@environment(tasks=rows)
async def conversed(task, chat):
    await chat.reply([{"role": "system", "content": HOSTILE}, {"role": "user", "content": task.prompt}], max_tokens=3)
    await chat.reply([{"role": "tool", "content": '{"result": 3}'}, {"role": "user", "content": "again"}], max_tokens=2)
    return Score(0.75, parts={"format": 0.5, "length": 0.25})
"""

RECIPE = """
model = "new:0.1m"
steps = 3
placement = "inline"
rollout = { groups = 2, group_size = 3, max_tokens = 6 }
trainer.lr = 5e-2
eval = { every = 0, final_tasks = 40 }
scoring.workers = 1
"""


class Said(SimpleNamespace):
    code: int
    out: str


@pytest.fixture
def tidemill():
    """The command line in this process: what it printed, and its status. A ConfigError is what `cli.main` would print."""

    def call(*args: object) -> Said:
        result = CliRunner().invoke(app, [str(a) for a in args], catch_exceptions=True)
        if isinstance(result.exception, ConfigError):
            return Said(code=2, out=str(result.exception))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Said(code=result.exit_code, out=result.stdout)

    return call


def train(folder: Path, name: str, env: str) -> Path:
    (folder / "env.py").write_text(ENVIRONMENT + CONVERSED)
    (folder / "recipe.toml").write_text(RECIPE)
    given = [f"run_dir={folder / name}", f"env={folder / 'env.py'}:{env}"]
    result = CliRunner().invoke(app, ["train", str(folder / "recipe.toml"), *given, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.stdout
    return folder / name


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run. Not to be changed: `run` is a copy."""
    return train(tmp_path_factory.mktemp("commands"), "run", "checksum")


@pytest.fixture(scope="session")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run in which some attempts have no score."""
    return train(tmp_path_factory.mktemp("troubled"), "run", "broken")


@pytest.fixture(scope="session")
def conversed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run whose environment sends system and tool messages, with limits of its own and a reward of parts."""
    return train(tmp_path_factory.mktemp("conversed"), "run", "conversed")


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run", symlinks=True))
