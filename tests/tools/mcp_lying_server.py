"""A server over stdio that speaks MCP until a tool is called, and then does what its argument says."""

from __future__ import annotations

import json
import os
import sys
import time

from mcp_lying_content import OPENS, TOOL

how = sys.argv[1]


def say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def answer(number: object, **body: object) -> None:
    say(json.dumps({"jsonrpc": "2.0", "id": number, **body}) + "\n")


def lie(number: object) -> None:
    if how == "half":
        say('{"jsonrpc": "2.0", "id": ')
    elif how == "garbage":
        say("\x00\xff not JSON\n[1, 2]\n{}\n" + "[" * 20_000 + "\n")
        answer(number, result={"content": [{"type": "text", "text": "after all"}]})
    elif how == "endless line":
        while True:
            say("x" * (1 << 20))
    elif how == "endless lines":
        while True:
            answer(None, error={"code": 1, "message": "x"})
    elif how == "wrong result":
        answer(number, result={"content": 7})
    elif how == "wrong id":
        answer("another", result={"content": []})
    elif how == "closes":
        os.close(1)
        time.sleep(600)
    elif how == "deaf":
        time.sleep(600)
    elif how == "ten thousand answers":
        for text in ["the first", *["another"] * 9_999]:
            answer(number, result={"content": [{"type": "text", "text": text}]})
    elif how == "error":
        answer(number, error={"code": -32603, "message": "broken"})


if how == "silent":
    time.sleep(600)
if how == "ends at once":
    sys.exit("I cannot start")
for line in sys.stdin:
    asked = json.loads(line)
    match asked.get("method"):
        case "initialize":
            answer(asked["id"], result=OPENS)
        case "tools/list" if how == "endless list":
            answer(asked["id"], result={"tools": [TOOL], "nextCursor": "more"})
        case "tools/list":
            answer(asked["id"], result={"tools": [TOOL]})
        case "tools/call":
            lie(asked["id"])
        case _ if "id" in asked:
            answer(asked["id"], error={"code": -32601, "message": "no such method"})
