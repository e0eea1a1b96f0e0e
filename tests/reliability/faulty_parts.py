"""An environment with tools, an MCP server, a sandbox and an agent behind a gateway, each of which fails at random.

An attempt asks the policy, then uses all parts, one of which fails as its seed says. What it is about to return is noted in
a file before it is returned: a score that is not noted there is none. `FAULTY_PARTS` names the folder of the notes.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tidemill import Chat, McpServer, Score, Task, ToolSet, environment
from tidemill.envs.agent_player import ProgramPerEpisode, play_task
from tidemill.sandbox import supervisor_process
from tidemill.sandbox.execution import SandboxedProgram
from tidemill.sandbox.sandbox_pool import Sandbox
from tidemill.sandbox.sandbox_settings import SandboxSettings
from tidemill.tools import mcp_session

ALPHABET = "abcd=:\n"
TESTS = Path(__file__).parents[1]
FOLDER = Path(os.environ.get("FAULTY_PARTS", "."))
AGENT = [sys.executable, str(TESTS / "envs" / "programs" / "faulty_agent.py")]
SERVER = [sys.executable, str(TESTS / "tools" / "mcp_demo_server.py"), "stdio"]
LIAR = [sys.executable, str(TESTS / "tools" / "mcp_lying_server.py"), "wrong result"]
FAULTS = {
    "agent": ("killed", "frozen", "slow", "wrong type", "half", "huge", "many"),
    "tool": ("killed", "frozen", "slow", "lying", "many"),
    "mcp": ("killed", "frozen", "slow", "lying"),
    "sandbox": ("killed", "frozen", "slow", "lying"),
    "gateway": ("killed", "frozen", "lying", "many"),
}
CELLS = [(part, fault) for part, faults in FAULTS.items() for fault in faults]
ENDS = [(part, fault) for part in ("tool", "gateway") for fault in ("killed", "frozen")]  # of the worker, with all in it
SEED, NONE = 20, 12  # NONE: attempts without a fault, for as many as there are faults

mcp_session.CHECK_S = supervisor_process.GRACE_S = supervisor_process.END_S = 1.0
server, liar = McpServer(SERVER, limit_s=2.0, restarts=1000), McpServer(LIAR, limit_s=2.0, restarts=1000)


def tasks(split: str) -> list[dict[str, str]]:
    mark = "=" if split == "train" else ":"
    return [{"prompt": f"{c}{d}{mark}", "answer": c} for c in "abcd" for d in "abcd"]


def note(kind: str, *words: Any) -> None:
    """Add a line to the notes, of all processes, at once."""
    with open(FOLDER / "notes", "ab", buffering=0) as file:
        file.write(json.dumps([kind, *words]).encode() + b"\n")


def first(what: str) -> bool:
    """True for the one who asks first, of all processes."""
    try:
        (FOLDER / what).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": name, "arguments": arguments}}


def end_this(fault: str) -> None:
    """Kill or stop this worker, as code of an environment may."""
    os.kill(os.getpid(), signal.SIGKILL if fault == "killed" else signal.SIGSTOP)


class Parts:
    """The parts of one attempt. `of` is the fault that a part has, "" if it has none."""

    def __init__(self, part: str, fault: str, chat: Chat) -> None:
        self.of: Callable[[str], str] = lambda name: fault if name == part else ""
        self.chat = chat

    async def tool(self) -> None:
        fault = self.of("tool")

        def plain() -> str:
            """Work, or fail."""
            if fault in ("killed", "frozen"):
                end_this(fault)
            return "x" * (4 << 20) if fault == "lying" else "fine"

        async def slow() -> str:
            """Wait."""
            await asyncio.sleep(600)
            return "late"

        tools = ToolSet([plain, slow], limit_s=0.2 if fault == "slow" else 60.0)
        many = 10_000 if fault == "many" else 1
        found = await tools.results([call("slow" if fault == "slow" else "unknown" if many > 1 else "plain")] * many)
        assert all(bool(each.fault) == (fault in ("slow", "many")) for each in found)

    async def mcp(self) -> None:
        fault = self.of("mcp")
        tools = ToolSet(await (liar if fault == "lying" else server).tools())
        if fault == "lying":
            await tools.call(call("lie"))
        if fault in ("killed", "frozen"):
            pid = (await tools.result(call("pid"))).content
            if pid.isdigit():  # else another attempt's fault was there first
                os.kill(int(pid), signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
        await tools.call(call("wait") if fault == "slow" else call("add", a=1, b=2))

    async def sandbox(self) -> None:
        fault = self.of("sandbox")
        source = {"slow": "while True: pass", "lying": "while True: print('x' * 9999)"}.get(fault, "print(1)")
        async with Sandbox(SandboxSettings(level="limits", warm=1, at_once=1, seconds=0.5 if fault else 60.0)) as sandbox:
            if fault in ("killed", "frozen"):
                for pid in sandbox.processes:
                    os.kill(pid, signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
            done = await sandbox.run(SandboxedProgram(source))
        assert bool(done.limit) == (fault in ("slow", "lying")), done

    async def gateway(self) -> None:
        fault = self.of("gateway")
        async with self.chat.serve() as model:
            headers = {"authorization": f"Bearer {model.key}"}
            how: dict[str, Any] = {"headers": headers, "timeout": 60, "trust_env": False, "verify": False}
            async with httpx.AsyncClient(base_url=model.url, **how) as client:
                body = {"model": "m", "messages": [{"role": "user", "content": "ab="}]}
                for raw in (b'{"model": "m", "mess', b"<html>", b" " * (9 << 20)) if fault == "lying" else ():
                    assert (await client.post("/chat/completions", content=raw)).status_code >= 400
                asked = [asyncio.ensure_future(client.post("/chat/completions", json=body)) for _ in range(2)]
                if fault in ("killed", "frozen"):
                    end_this(fault)
                for each in [*asked, *(client.post("/chat/completions", content=b"{") for _ in range(self._many))]:
                    await each

    @property
    def _many(self) -> int:
        return 300 if self.of("gateway") == "many" else 0

    async def agent(self) -> Any:
        fault = self.of("agent")
        player = ProgramPerEpisode(AGENT, 2.0 if fault in ("frozen", "slow") else 120.0, False)
        task = Task("t", "ab=", {"word": fault, "note": str(FOLDER / "agents" / secrets.token_hex(8))})
        return await play_task(player, task, self.chat)


@environment(tasks=tasks)
async def parts(task: Task, chat: Chat) -> Any:
    said = await chat.reply(task.prompt)
    rng = random.Random(f"{SEED} {task.id} {said}")
    part, fault = rng.choice([*CELLS, *[("", "")] * NONE])
    if (part, fault) in ENDS and not first(f"{part} {fault}"):
        part, fault = "", ""
    name = secrets.token_hex(8)
    note("begun", name, part, fault)
    of = Parts(part, fault, chat)
    work = [of.tool, of.mcp, of.sandbox, of.gateway]
    rng.shuffle(work)
    for each in work:
        await each()
    outcome = await of.agent()
    if not isinstance(outcome, Score):
        note("no score", name, outcome.reason)
        return outcome
    value = 0.5 * said.startswith(task.data["answer"]) + 0.5 * (said == task.data["answer"])
    note("score", name, value)
    return Score(value, {"name": float(int(name[:12], 16))})
