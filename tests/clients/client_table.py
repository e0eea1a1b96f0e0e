"""Agents of other people's clients through the gateway, unmodified: a table of which work.

    cd tests && python -m clients.client_table FOLDER      builds an environment for each client in the folder, runs all

Each agent is a process that knows nothing of Tidemill but the usual environment variables. It is asked for 17 + 25, has a
tool that adds, and prints its answer. The policy is a script here, so that every run is the same; what is recorded is
checked: all tokens that were sampled, each once, and the whole of the agent's loop in one row.
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

import numpy as np
from envs.scripted_engine import ScriptedEngine
from envs.test_conversations_with_tools import HERMES, chat_tokenizer

from tidemill.core.types import SamplingParams
from tidemill.envs.chat import EpisodeChat, rollout_seeds

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


def policy() -> tuple[EpisodeChat, ScriptedEngine]:
    """A chat whose policy adds with the tool, says the result, and hands it in where there is a tool for that."""
    tokenizer = chat_tokenizer(HERMES)

    def answer(tokens: np.ndarray, params: SamplingParams) -> list[int]:
        prompt = tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
        if "<|im_start|>tool" not in prompt:
            text = 'I add. <tool_call>{"name":"add","arguments":{"b":25,"a":17}}</tool_call>'
        elif '"name": "submit"' in prompt:
            text = '<tool_call>{"name":"submit","arguments":{"answer":"It is 42."}}</tool_call>'
        else:
            text = "It is 42."
        ids = [i for letter in text for i in tokenizer.encode(letter, add_special_tokens=False)]
        return [*ids, tokenizer.eos_token_id]

    engine = ScriptedEngine(answer)
    params = SamplingParams(stop_ids=(tokenizer.eos_token_id,), max_tokens=400)
    return EpisodeChat(engine, tokenizer, params, context=10_000, key="k", seeds=rollout_seeds(0, 0, 0)), engine


async def played(python: Path, command: list[str], home: str) -> dict[str, Any]:
    """One episode of an agent: what it said, and what was recorded."""
    chat, engine = policy()
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
    rows = chat.rows()
    made = [token for each in engine.completions for token in each.tokens.tolist()]
    kept = [token for row in rows for token in row.tokens[row.mask].tolist()]
    answer = out.decode().strip().splitlines()[-1:] or [error.decode().strip()[-300:]]
    ok = process.returncode == 0 and "42" in answer[0] and made == kept and max(row.turns for row in rows) == 2
    seconds = time.monotonic() - begin
    return {"ok": ok, "answer": answer[0], "calls": counts["calls"], "rows": len(rows), "tokens": len(kept), "s": seconds}


def main(folder: Path) -> int:
    failed = 0
    print(f"{'client':32} {'works':6} {'calls':>5} {'rows':>4} {'tokens':>6} {'seconds':>7}  answer")
    for name, packages, command in CLIENTS:
        python = environment_of(folder, packages)
        with tempfile.TemporaryDirectory() as home:
            found = asyncio.run(played(python, command, home))
        failed += not found["ok"]
        numbers = f"{found['calls']:5} {found['rows']:4} {found['tokens']:6} {found['s']:7.1f}"
        print(f"{name:32} {'yes' if found['ok'] else 'NO':6} {numbers}  {json.dumps(found['answer'])}", flush=True)
    return failed


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("expected a folder for the clients' environments")
    raise SystemExit(main(Path(sys.argv[1]).resolve()))
