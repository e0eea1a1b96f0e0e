"""`tidemill serve` as a command: what it says, how it ends, and what it refuses before it loads anything."""

from __future__ import annotations

import importlib.util
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from openai import BadRequestError, OpenAI
from serving_cases import Running
from typer.testing import CliRunner

from tidemill.cli.commands import serve as serving
from tidemill.cli.commands.serve import key_of, serve, served_name
from tidemill.cli.main import app
from tidemill.core.errors import ConfigError
from tidemill.web_server import http_server

pytestmark = pytest.mark.runs

ASKED: dict[str, Any] = {
    "host": "127.0.0.1",
    "port": 0,
    "api_key": None,
    "context": None,
    "dtype": "float32",
    "threads": None,
}


def test_from_start_to_interrupt(characters: Running, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tidemill", "serve", str(characters.folder), "--port", "0", "--context", "256"]
    command += ["--dtype", "bfloat16", "--threads", "1"]
    held, log = "engine:generate:*:slow:2", tmp_path / "faults"  # at the first step of the only reply
    more = {"TIDEMILL_API_KEY": "sesame", "TIDEMILL_FAULTS": held, "TIDEMILL_FAULT_LOG": str(log)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, env=os.environ | more) as process, ThreadPoolExecutor(1) as beside:
        try:
            assert process.stdout is not None and process.stderr is not None
            said = process.stdout.readline()
            assert "letters" in said and "context 256" in said and "bfloat16" in said
            url = re.findall(r"http://127\.0\.0\.1:\d+/v1", said)[0]
            with OpenAI(base_url=url, api_key="sesame", max_retries=0, timeout=30) as client:
                returns_memory(process.pid, client)
                asked: dict[str, Any] = {"max_tokens": 1999, "extra_body": {"ignore_eos": True}}
                asking = beside.submit(client.completions.create, model="letters", prompt="tide", **asked)
                until(lambda: log.exists() and held in log.read_text())
                process.send_signal(signal.SIGINT)  # while the engine is held back, before 250 steps
                reply = asking.result(30)
                assert reply.usage is not None and reply.usage.total_tokens == 256
                assert reply.choices[0].finish_reason == "length", "what is being answered is answered to its end"
            assert process.wait(20) == 0
            assert "Traceback" not in process.stderr.read()
        finally:
            process.kill()


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, 60 seconds at most."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def returns_memory(pid: int, client: OpenAI) -> None:
    """Requests of eight megabytes leave the process as large as it was."""
    process, before = psutil.Process(pid), psutil.Process(pid).memory_info().rss
    for _ in range(4):
        with pytest.raises(BadRequestError, match="context"):
            client.completions.create(model="letters", prompt="t" * 8_000_000)
    end = time.monotonic() + 60
    while (kept := process.memory_info().rss - before) > 6 << 20:
        assert time.monotonic() < end, f"{kept >> 20} MB are kept"
        time.sleep(0.05)


def test_a_port_in_use_is_found_before_loading(tmp_path: Path) -> None:
    """The folder holds no model: were it looked at first, this would be another message."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "tidemill", "serve", str(tmp_path), "--port", port]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    expected = f"error: port {port} on 127.0.0.1 is in use: choose another with --port, or 0 for any free one\n"
    assert ended.stderr == expected


def test_refusals(characters: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="not a folder"):
        serve(tmp_path / "nothing", **ASKED)
    with pytest.raises(ConfigError, match="give a key"):
        serve(characters.folder, **ASKED | {"host": "0.0.0.0"})
    with pytest.raises(ConfigError, match="the API key is"):
        serve(characters.folder, **ASKED | {"api_key": ""})
    with pytest.raises(ConfigError, match="dtype = 'float8'"):
        serve(characters.folder, **ASKED | {"dtype": "float8"})
    with pytest.raises(ConfigError, match="this model's context is 2048"):
        serve(characters.folder, **ASKED | {"context": 4096})
    with pytest.raises(ValueError, match=r"no config\.json"):
        serve(tmp_path, **ASKED)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find(name))
    with pytest.raises(ConfigError, match="pip install uvicorn"):
        serve(characters.folder, **ASKED)


def test_where_the_key_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIDEMILL_API_KEY", raising=False)
    file = tmp_path / "key"
    file.write_text("of the file\r\nand more\n")
    assert key_of(None, None) is None
    assert key_of(None, file) == "of the file"
    monkeypatch.setenv("TIDEMILL_API_KEY", "of the environment")
    assert (key_of(None, None), key_of("given", None), key_of("", None)) == ("of the environment", "given", "")
    assert key_of(None, file) == "of the file"
    with pytest.raises(ConfigError, match="both given"):
        key_of("given", file)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        key_of(None, tmp_path / "absent")
    file.write_text("")
    with pytest.raises(ConfigError, match="the API key is empty"):
        serve(tmp_path, **ASKED | {"api_key": key_of(None, file)})


@pytest.mark.parametrize(
    ("given", "key"),
    [([], "of the environment"), (["--api-key", "given"], "given"), (["--api-key-file", "key"], "of the file")],
)
def test_the_command_serves_with_that_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], key: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "key").write_text("of the file\n")
    served = list[Any]()
    monkeypatch.setattr(serving, "serve", lambda *asked: served.append(asked) or 0)
    done = CliRunner().invoke(app, ["serve", "m", *given], env={"TIDEMILL_API_KEY": "of the environment"})
    assert done.exit_code == 0 and [asked[3] for asked in served] == [key]


@pytest.mark.parametrize(
    ("limits", "most", "after"),
    [
        ((1024, 4096), 1024, (1280, 4096)),
        ((1024, 1100), 844, (1100, 1100)),
        ((32, 32), 8, (32, 32)),
        ((256, resource.RLIM_INFINITY), 1024, (1280, resource.RLIM_INFINITY)),
        ((9000, 9000), 1024, (9000, 9000)),
    ],
)
def test_there_are_no_more_connections_than_descriptors(limits, most, after, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [limits]
    monkeypatch.setattr(resource, "getrlimit", lambda _: now[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: now.append(pair))
    assert (http_server.connections(), now[-1]) == (most, after)


def test_names() -> None:
    assert served_name(Path("/models/Qwen3-0.6B")) == "Qwen3-0.6B"
    assert served_name(Path("runs/demo/final")) == "demo-final"
