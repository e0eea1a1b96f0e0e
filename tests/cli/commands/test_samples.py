"""`tidemill samples`: what it shows is what the ledger holds, token by token, with the provenance that was recorded."""

from __future__ import annotations

import json
import os
import pty
import re
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tidemill.cli.commands.conversation import Segment, segments
from tidemill.core.types import Finish, Group, InfraError, Said, Task, Trajectory, Unscorable, Version
from tidemill.ledger import SqliteLedger
from tidemill.observability.safe_text import visible

pytestmark = pytest.mark.runs


def trajectory(mask: list[int], **changes) -> Trajectory:
    flags = np.array(mask, bool)
    return Trajectory(
        tokens=np.arange(3, 3 + len(mask), dtype=np.int32),
        mask=flags,
        logprobs=np.where(flags, -0.5, 0).astype(np.float32),
        versions=np.where(flags, 2, -1).astype(np.int32),
        finish=Finish.STOP,
        **changes,
    )


@pytest.mark.parametrize(
    ("mask", "found"),
    [
        ([0, 0, 1, 1], [("prompt", 0, 2), ("sampled", 2, 4)]),
        ([0, 1, 0, 0, 1], [("prompt", 0, 1), ("sampled", 1, 2), ("environment", 2, 4), ("sampled", 4, 5)]),
        ([1, 0], [("sampled", 0, 1), ("environment", 1, 2)]),
        ([0, 0], [("prompt", 0, 2)]),
        ([], []),
    ],
)
def test_provenance_is_what_was_recorded(mask, found):
    assert segments(trajectory(mask)) == [Segment(*f) for f in found]


def test_tokens_as_json_are_those_of_the_ledger(tidemill, trained: Path):
    shown = json.loads(tidemill("samples", trained, "--step", 2, "--worst", 4, "--tokens", "--json").out)
    assert len(shown) == 4
    with SqliteLedger(trained, mode="read") as ledger:
        for sample in shown:
            recorded, tokens = ledger.load_trajectory(sample["group_id"], sample["place"]), sample["tokens"]
            assert [t["id"] for t in tokens] == recorded.tokens.tolist()
            assert [t["from"] == "sampled" for t in tokens] == recorded.mask.tolist()
            kinds = [kind for i, kind in enumerate(t["from"] for t in tokens) if i == 0 or tokens[i - 1]["from"] != kind]
            assert kinds == ["prompt", "sampled", "environment", "sampled"]
            sampled = [t for t in tokens if t["from"] == "sampled"]
            assert [t["version"] for t in sampled] == recorded.versions[recorded.mask].tolist()
            assert [t["logprob"] for t in sampled] == recorded.logprobs[recorded.mask].tolist()
            assert all(t["version"] is None and t["logprob"] is None for t in tokens if t["from"] != "sampled")
            assert sample["reward"] == recorded.reward and sample["n_tokens"] == len(tokens)
            prompt = "".join(t["text"] for t in tokens if t["from"] == "prompt")
            assert prompt == f"{sample['task']['prompt']}\n"


def test_steps_are_counted_as_the_display_counts_them(tidemill, trained: Path):
    with SqliteLedger(trained, mode="read") as ledger:
        first = set(ledger.groups_of(0))
    shown = json.loads(tidemill("samples", trained, "--step", 1, "--json").out)
    assert {s["group_id"] for s in shown} == first and {s["step"] for s in shown} == {1}
    assert "tokens" not in shown[0]
    for step, says in ((0, "counted from 1"), (4, "no step 4: it has steps 1 to 3")):
        said = tidemill("samples", trained, "--step", step)
        assert said.code == 2 and says in said.out


def test_order_and_number(tidemill, trained: Path):
    with SqliteLedger(trained, mode="read") as ledger:
        rewards = sorted(t.reward for g in range(6) for t in ledger.load(g).trajectories)
    assert rewards[0] < rewards[-1]
    for option, expected in (("--worst", rewards[:5]), ("--best", rewards[::-1][:5])):
        assert [s["reward"] for s in json.loads(tidemill("samples", trained, option, 5, "--json").out)] == expected
    latest = json.loads(tidemill("samples", trained, "--json").out)
    assert len(latest) == 10 and latest[0]["group_id"] == 5
    assert tidemill("samples", trained, "--best", 1, "--worst", 1).out.endswith("choose one")
    assert "--best 0" in tidemill("samples", trained, "--best", 0).out


def test_plain_text_names_provenance_version_and_logprob(tidemill, trained: Path):
    sample = json.loads(tidemill("samples", trained, "--step", 3, "--best", 1, "--tokens", "--json").out)[0]
    out = tidemill("samples", trained, "--step", 3, "--best", 1, "--tokens").out
    assert "\x1b" not in out and all(line == line.rstrip() for line in out.splitlines())
    labels = [line.split()[0] for line in out.splitlines() if re.match(r"  \S", line)]
    assert labels[:5] == ["prompt", "sampled", "environment", "sampled", "answer"]
    assert labels[5:] == (["cut"] if sample["cut_off"] else [])
    sampled = [t for t in sample["tokens"] if t["from"] == "sampled"]
    numbers, versions = re.findall(r"-?\d+\.\d\d\b", out.split("\n", 1)[1]), re.findall(r"\bv\d+\b", out.split("\n", 1)[1])
    assert numbers == [f"{t['logprob']:.2f}" for t in sampled]
    assert versions == [f"v{t['version']}" for t in sampled]
    assert "again↵" in out and f"sample {sample['group_id']}.{sample['place']}" in out


def test_a_terminal_gets_colours_by_provenance(trained: Path):
    ours, theirs = pty.openpty()
    args = [sys.executable, "-m", "tidemill", "samples", str(trained), "--worst", "1", "--tokens"]
    environment = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {"TERM": "xterm-256color", "COLUMNS": "60"}
    process = subprocess.Popen(args, stdout=theirs, stderr=subprocess.PIPE, env=environment)
    os.close(theirs)
    out = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # Linux says so when the other side is closed
            break
        if not chunk:
            break
        out += chunk
    os.close(ours)
    assert process.wait(30) == 0, process.stderr and process.stderr.read()
    assert process.stderr is not None
    process.stderr.close()
    text = out.decode()
    for label, code in (("prompt", 36), ("sampled", 32), ("environment", 35)):
        assert f"\x1b[{code}m{label}" in text
    assert re.search(r"\x1b\[35m↵?again↵", text)
    assert max(len(line) for line in re.sub(r"\x1b\[[\d;]*m", "", text).splitlines() if line.startswith("  ")) <= 60


def test_beside_a_live_run(tidemill, run: Path):
    """A writer holds the ledger; a group it has just finished is shown as pending, and one it dropped with its reason."""
    with SqliteLedger(run, mode="open") as writer:
        for group_id in (6, 7):
            outcome = InfraError("the sandbox died\x1b[2J")
            said = (Said("user", "hello"), Said("assistant", "a\x1b]0;title\x07", policy=True))
            attempt = trajectory([0, 1], sources=(Version(2),), outcome=outcome, text="a", temperature=0.5, said=said)
            writer.admit(group_id, Task(f"t{group_id}", [{"role": "user", "content": "hello"}]))
            writer.finish(Group(group_id, Task(f"t{group_id}", "p"), [attempt]))
        writer.drop(6, "unscored")
        out = tidemill("samples", run).out
        blocks = out.split("\n\n")
    assert blocks[0].startswith("pending  infra_error: the sandbox died␛[2J") and blocks[1].startswith("dropped: unscored")
    assert (
        re.search("^  user +hello$", blocks[0], re.M)
        and "a␛]0;title␇" in blocks[0]
        and "\x1b" not in out
        and "\x07" not in out
    )
    assert "temperature 0.5" in tidemill("samples", run, "--tokens").out


def test_attempts_without_a_score_are_not_ranked_but_shown(tidemill, troubled: Path):
    everything = json.loads(tidemill("samples", troubled, "--json").out) + json.loads(
        tidemill("samples", troubled, "--best", 100, "--json").out
    )
    assert all(s["reward"] is not None for s in everything[10:])
    assert any("RuntimeError" in (s["outcome_reason"] or "") for s in everything)


@pytest.mark.parametrize("option", ["--worst", "--best"])
def test_where_none_has_a_score_the_failures_are_shown(tidemill, tmp_path: Path, option: str):
    (tmp_path / "config.json").write_text("{}")
    with SqliteLedger(tmp_path, mode="create") as ledger:
        for number in range(3):
            ledger.admit(number, Task("t", "p"))
            failed = trajectory([0, 1], sources=(Version(2),), outcome=Unscorable(f"no gold for {number}"))
            ledger.finish(Group(number, Task("t", "p"), [failed]))
        ledger.event("now", {})  # a reader beside the run sees what finished with the next such call
        said, found = tidemill("samples", tmp_path, option, 2), tidemill("samples", tmp_path, option, 2, "--json")
    assert said.code == found.code == 0 and said.out.startswith(f"none has a score, so that {option} cannot rank them")
    assert "no gold for 2" in said.out and "no gold for 1" in said.out and "no gold for 0" not in said.out
    assert [each["outcome_reason"] for each in json.loads(found.out)] == ["no gold for 2", "no gold for 1"]


def test_the_whole_conversation_with_what_it_earned_and_which_limit_cut_it(tidemill, conversed: Path):
    """Every turn under its role, a tool's too; what the policy wrote from what was sent; hostile text is harmless."""
    shown = json.loads(tidemill("samples", conversed, "--step", 1, "--best", 1, "--json").out)[0]
    said = shown["conversation"]
    assert [(each["role"], each["policy"]) for each in said] == [
        *(("system", False), ("user", False), ("assistant", True)),
        *(("tool", False), ("user", False), ("assistant", True)),
    ]
    assert said[0]["content"] == "be brief \x1b[2J\x1b]0;owned\x07\u202e" and said[-1]["content"] == shown["text"]
    assert shown["reward"] == 0.75 and shown["reward_parts"] == {"format": 0.5, "length": 0.25}
    out = tidemill("samples", conversed, "--step", 1, "--best", 1).out
    rows = [line[2:].split("  ", 1) for line in out.splitlines() if re.match(r"  \S", line)]
    assert [label for label, _ in rows[:6]] == ["system", "user", "policy", "tool", "user", "policy"]
    assert rows[0][1].strip() == "be brief ␛[2J␛]0;owned␇�" and rows[3][1].strip() == '{"result": 3}'
    assert not [c for c in out if not c.isprintable() and c != "\n"]
    facts = {label: text[0].strip() for label, *text in rows[6:] if text}
    assert facts["reward"] == "0.75: format 0.5, length 0.25"
    assert facts["cut off"] == "by the environment's or agent's own max_tokens = 2"
    assert shown["cut_off"] == {"by": "own", "tokens": 2}
    tokens = tidemill("samples", conversed, "--step", 1, "--best", 1, "--tokens").out
    assert "by the environment's or agent's own max_tokens = 2" in tokens and "format 0.5" in tokens


def test_an_older_payload_without_messages_is_decoded(tidemill, run: Path, tmp_path: Path, monkeypatch):
    load = SqliteLedger.load_trajectory
    monkeypatch.setattr(SqliteLedger, "load_trajectory", lambda *args: replace(load(*args), said=(), info={}))
    shown = json.loads(tidemill("samples", run, "--worst", 1, "--json").out)[0]
    assert [each["role"] for each in shown["conversation"]] == ["prompt", "sampled", "environment", "sampled"]
    assert shown["conversation"][2]["content"].endswith("again\n")
    out = tidemill("samples", run, "--worst", 1).out
    assert [line.split()[0] for line in out.splitlines() if re.match(r"  [a-z]", line)][:3] == [
        "prompt",
        "sampled",
        "environment",
    ]
    (run / "initial").unlink()  # no tokenizer: the index has the prompt and the last reply
    out = tidemill("samples", run, "--worst", 1).out
    assert re.search(r"^  prompt +(train|eval) ", out, re.M) and re.search(r"^  reply ", out, re.M)
    assert json.loads(tidemill("samples", run, "--worst", 1, "--json").out)[0]["conversation"] is None


def test_what_retention_removed_is_said(tidemill, run: Path):
    with sqlite3.connect(run / "ledger.sqlite") as db:
        db.execute("UPDATE trajectories SET gone_at = 1")
    db.close()
    assert "removed by retention" in tidemill("samples", run, "--worst", 1, "--tokens").out
    assert "removed by retention" in tidemill("samples", run, "--worst", 1).out
    assert json.loads(tidemill("samples", run, "--worst", 1, "--json").out)[0]["conversation"] is None
    assert json.loads(tidemill("samples", run, "--worst", 1, "--tokens", "--json").out)[0]["tokens"] is None


def test_nothing_to_show_is_one_sentence(tidemill, run: Path, tmp_path: Path):
    assert "is not a run" in tidemill("samples", tmp_path / "nowhere").out
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "config.json").write_text("{}")
    with SqliteLedger(tmp_path / "early", mode="create") as ledger:
        said = tidemill("samples", tmp_path / "early")
        assert said.code == 2 and "no trajectories: none of its groups was finished; it is running" in said.out
        assert "none was begun yet" in tidemill("samples", tmp_path / "early", "--step", 1).out
        ledger.admit(0, Task("t", "p"))
    assert tidemill("samples", tmp_path / "early", "--worst", 1).code == 2
    (run / "initial").unlink()
    assert "tokenizer" in tidemill("samples", run, "--tokens").out


def test_text_cannot_move_the_cursor():
    assert visible("a\nb\tc\x1b[31m\x7f\x9b") == "a↵b⇥c␛[31m␡�"
