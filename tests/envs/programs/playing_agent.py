"""An agent without any library: it asks the policy by HTTP and does what the task's word says."""

import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request


def ask(base_url: str, key: str, messages: list) -> str:
    raw = json.dumps({"model": "any", "messages": messages}).encode()
    request = urllib.request.Request(f"{base_url}/chat/completions", raw, {"authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def play(task: dict, base_url: str, key: str) -> dict:
    word = task["data"].get("word", "")
    if word == "fail":
        print("something went wrong here", file=sys.stderr)
        sys.exit(3)
    if word == "raises":
        return {"id": task["id"], "score": task["data"]["answer"] + 1}
    if word == "hang":
        print("waiting", flush=True)
        time.sleep(3600)
    if word == "flood":
        while True:
            sys.stdout.write("a" * 100_000)
    if word == "orphan":
        left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
        with open(task["data"]["note"], "w") as file:
            file.write(str(left.pid))
    if word == "killed":
        os.kill(os.getpid(), 9)
    if word == "ignored":
        sys.stdin.close()
    if word == "refused":
        try:
            ask(base_url, key, [{"role": "user"}])
        except urllib.error.HTTPError:
            return {"id": task["id"], "score": 0.0}
    if word == "silent score":
        return {"id": task["id"], "score": 0.0}
    said = ask(base_url, key, [{"role": "user", "content": task["prompt"]}])
    if word == "forged":
        return {"id": "x", "printed": said}
    if word == "twice":
        said += ask(base_url, key, [{"role": "user", "content": task["prompt"]}, {"role": "assistant", "content": said}])
    verdict = {"id": task["id"], "score": float(task["data"].get("answer", "") in said), "parts": {"length": len(said)}}
    return verdict | task["data"].get("more", {})


def main() -> None:
    if "--all" in sys.argv:
        turn = threading.Lock()

        def answer(line: str) -> None:
            task = json.loads(line)
            if task["data"].get("word") == "die":
                os._exit(7)
            if task["data"].get("word") == "silent":
                return
            verdict = play(task, task["base_url"], task["api_key"])
            with turn:
                print(json.dumps(verdict), flush=True)

        for line in sys.stdin:
            threading.Thread(target=answer, args=(line,), daemon=True).start()
        return
    task = json.loads(sys.stdin.readline())
    assert task["id"] == os.environ["TIDEMILL_ID"]
    if "TIDEMILL_TASK" in os.environ:
        assert json.loads(os.environ["TIDEMILL_TASK"]) == task
    if "TIDEMILL_PROMPT" in os.environ:
        assert os.environ["TIDEMILL_PROMPT"] == task["prompt"]
    verdict = play(task, os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
    print("some line")
    print(verdict.get("printed") or json.dumps(verdict))


if __name__ == "__main__":
    main()
