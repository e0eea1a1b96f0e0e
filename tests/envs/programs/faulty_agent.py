"""An agent that asks the policy once, and then fails as the task's word says: python faulty_agent.py [--all]"""

import json
import os
import signal
import sys
import threading
import time
import urllib.request


def ask(base_url: str, key: str, prompt: str) -> str:
    raw = json.dumps({"model": "any", "messages": [{"role": "user", "content": prompt}]}).encode()
    request = urllib.request.Request(f"{base_url}/chat/completions", raw, {"authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def fail(word: str, verdict: str) -> None:
    """Do what the word says; a verdict follows only where the fault is survived."""
    if word == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "frozen":
        os.kill(os.getpid(), signal.SIGSTOP)  # which another thread may take before this one is stopped
    if word in ("frozen", "slow", "complaining"):
        time.sleep(3600)
    if word == "wrong type":
        sys.stdout.buffer.write(b"<html>\xff\xfe 1.0</html>\nscore: 1.0\n[1, 2]\n" + b"\x00" * 100 + b"\n1.0\n")
    elif word == "huge":
        for _ in range(4096):
            say("x" * 4095 + "\n")
        say(verdict)
    elif word == "half":
        say(verdict.strip()[:-2])
    elif word == "many":
        for number in range(10_000):
            say(verdict.replace("1.0", f"{number}.5"))
        say(verdict)
    else:
        say(verdict)


def play(task: dict, base_url: str, key: str) -> None:
    word = task["data"].get("word", "")
    ask(base_url, key, task["prompt"])
    if word == "complaining":
        print("the database does not answer", file=sys.stderr, flush=True)
    with open(task["data"]["note"], "w") as file:
        file.write(f"{os.getpid()} ")
    fail(word, json.dumps({"id": task["id"], "score": 1.0}) + "\n")


if "--all" in sys.argv:
    for line in sys.stdin:
        told = json.loads(line)
        threading.Thread(target=play, args=(told, told["base_url"], told["api_key"]), daemon=True).start()
else:
    play(json.loads(sys.stdin.readline()), os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
    sys.stdout.flush()
