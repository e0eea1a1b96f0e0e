"""Agents of other people's clients through the gateway, and other people's MCP servers: a table of which work.

    cd tests && python -m clients.client_table FOLDER      builds an environment for each client in the folder, runs all

Each agent is a process that knows nothing of Tidemill but the usual environment variables. It is asked for 17 + 25, has a
tool that adds, and prints its answer. The policy is a script here, so that every run is the same; what is recorded is
checked: all tokens that were sampled, each once, and the whole of the agent's loop in one row. The MCP servers are examples
of the SDK's source (`clients.mcp_examples`), whose tools the policy calls.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from clients.mcp_examples import EXAMPLES, example_played, example_source
from clients.scripted_policy import all_recorded, scripted_policy

HERE = Path(__file__).parent
CLIENTS: list[tuple[str, list[str], list[str]]] = [  # name, packages, command
    ("openai: chat", ["openai"], ["openai_chat.py"]),
    ("openai: chat, streamed", ["openai"], ["openai_chat.py", "stream"]),
    ("openai: responses", ["openai"], ["openai_responses.py"]),
    ("openai: responses, stored", ["openai"], ["openai_responses.py", "stored"]),
    ("openai: responses, streamed", ["openai"], ["openai_responses.py", "stream"]),
    ("anthropic: messages", ["anthropic"], ["anthropic_messages.py"]),
    ("anthropic: messages, streamed", ["anthropic"], ["anthropic_messages.py", "stream"]),
    ("LangChain: agent, OpenAI", ["langchain", "langchain-openai", "langchain-anthropic"], ["langchain_agent.py"]),
    (
        "LangChain: agent, Anthropic",
        ["langchain", "langchain-openai", "langchain-anthropic"],
        ["langchain_agent.py", "anthropic"],
    ),
    ("inspect-ai: ReAct agent", ["inspect-ai", "openai"], ["inspect_agent.py"]),
]
LIMIT_S = 180.0


def environment_of(folder: Path, packages: list[str]) -> Path:
    """The Python of an environment with these packages, which is made if there is none."""
    python = folder / packages[0] / "bin" / "python"
    if not (done := folder / packages[0] / ".installed").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder / packages[0])], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True)
        done.touch()
    return python


def adding(prompt: str) -> str:
    """What a policy says that adds with the tool, says the result, and hands it in where there is a tool for that."""
    if "<|im_start|>tool" not in prompt:
        return 'I add. <tool_call>{"name":"add","arguments":{"b":25,"a":17}}</tool_call>'
    if '"name": "submit"' in prompt:
        return '<tool_call>{"name":"submit","arguments":{"answer":"It is 42."}}</tool_call>'
    return "It is 42."


async def played(python: Path, command: list[str], home: str) -> dict[str, Any]:
    """One episode of an agent: what it said, and what was recorded."""
    chat, engine = scripted_policy(adding)
    begin = time.monotonic()
    async with chat.serve() as model:
        environment = {"PATH": os.environ["PATH"], "HOME": home, **model.environment}
        process = await asyncio.create_subprocess_exec(
            str(python),
            str(HERE / command[0]),
            *command[1:],
            env=environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            out, error = await asyncio.wait_for(process.communicate(), LIMIT_S)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()  # bounded: it was killed
        counts = model.counts
    answer = out.decode().strip().splitlines()[-1:] or [error.decode().strip()[-300:]]
    ok = process.returncode == 0 and "42" in answer[0] and all_recorded(chat, engine, turns=2)
    return {"ok": ok, "answer": answer[0], "calls": counts["calls"], "rows": chat.rows(), "s": time.monotonic() - begin}


def show(name: str, found: dict[str, Any]) -> None:
    tokens = sum(int(row.mask.sum()) for row in found["rows"])
    numbers = f"{found['calls']:5} {len(found['rows']):4} {tokens:6} {found['s']:7.1f}"
    print(f"{name:32} {'yes' if found['ok'] else 'NO':6} {numbers}  {json.dumps(found['answer'])}", flush=True)


def main(folder: Path) -> int:
    failed = 0
    print(f"{'client':32} {'works':6} {'calls':>5} {'rows':>4} {'tokens':>6} {'seconds':>7}  answer")
    for name, packages, command in CLIENTS:
        python = environment_of(folder, packages)
        with tempfile.TemporaryDirectory() as home:
            found = asyncio.run(played(python, command, home))
        show(name, found)
        failed += not found["ok"]
    python = environment_of(folder, ["mcp", "uvicorn", "click"])
    source = example_source(python, folder / "mcp-source")
    for name, example in EXAMPLES.items():
        found = asyncio.run(example_played(python, source, example))
        show(name, found)
        failed += not found["ok"]
    return failed


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("expected a folder for the clients' environments")
    raise SystemExit(main(Path(sys.argv[1]).resolve()))
