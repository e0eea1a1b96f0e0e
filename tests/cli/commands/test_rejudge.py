"""`tidemill reward rejudge`: recorded attempts are judged again, and what was trained on stays."""

from __future__ import annotations

import json
import tarfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tidemill.cli.commands import rejudge
from tidemill.core.errors import LedgerError
from tidemill.core.types import Finish, Group, Outcome, Score
from tidemill.ledger import SqliteLedger

RECORDED = Path(__file__).parents[2] / "run" / "recorded" / "format_2.tar.gz"
FIXED = '''
def score(completion, answer):
    """Of the recorded reward, without its faults, and with another idea of a reply that ends in b."""
    return None if completion.endswith("c") else 0.5 if completion.endswith("b") else float(completion.startswith(answer))

def slow(completion):
    import time
    if completion == "d":
        time.sleep(60)
    raise SystemExit

def ranked(completions):
    assert len(completions) == 4, "siblings are judged together"
    return [sorted(completions).index(each) for each in completions]

def ends_well(completion):
    return 7.0 + len(completion)

def needs(completion, rubric):
    return 0.0
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    with tarfile.open(RECORDED) as archive:
        archive.extractall(tmp_path, filter="data")
    (tmp_path / "fixed.py").write_text(FIXED)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


def outcomes(folder: Path) -> dict[tuple[int, int], tuple[Outcome | None, str, str]]:
    """What was trained on, the reply and the answer, by group and place."""
    with SqliteLedger(folder, mode="read") as ledger:
        rows = ledger.samples(order="recent", limit=99)
        return {
            (r.group_id, r.place): (ledger.load_trajectory(r.group_id, r.place).outcome, r.text, r.task.data["answer"])
            for r in rows
        }


def kind(value: float | None) -> tuple[str, float | None]:
    return ("unscorable", None) if value is None else ("score", value)


def test_changed_outcomes_are_named_and_nothing_is_overwritten(tidemill, folder: Path) -> None:
    own: dict = {}
    exec(FIXED, own)
    recorded, expected = outcomes(folder), {}
    for key, (outcome, text, answer) in recorded.items():
        before = kind(outcome.value) if isinstance(outcome, Score) else (type(outcome).__name__, None)
        after = kind(own["score"](text, answer))
        if (before[0].lower(), before[1]) != after:
            expected[key] = after
    said = json.loads(tidemill("reward", "rejudge", "run", "--reward", "fixed.py:score", "--json").out)
    found = {(e["group_id"], e["place"]): (e["after"]["outcome"], e["after"]["reward"]) for e in said["changed"]}
    assert found == expected and len(expected) > 5 and list(found) == sorted(found)
    assert (said["attempts"], said["without_reply"], said["unreadable"]) == (32, 0, 0)
    assert outcomes(folder) == recorded
    with SqliteLedger(folder, mode="read") as ledger:
        rows = ledger._rows("SELECT group_id, sample, outcome, reward, judge FROM outcomes WHERE judgement = 1")
        assert {(r[0], r[1]): kind(own["score"](*recorded[r[0], r[1]][1:])) for r in rows} == {
            (r[0], r[1]): (r[2], r[3]) for r in rows
        }
        assert len(rows) == 32 and {r["judge"] for r in rows} == {"fixed.py:score"}
        detail = {"judge": "fixed.py:score", "attempts": 32, "changed": len(expected)}
        assert [event.detail for event in ledger.events("rejudged")] == [detail]

    group_id, place = next(key for key in expected if isinstance(recorded[key][0], Score))
    shown = tidemill("samples", "run", "--best", "99").out
    assert f"sample {group_id}.{place}" in shown and "judged again" in shown and "by fixed.py:score" in shown
    for command in ("ledger", "why"):
        assert "rejudged: fixed.py:score, attempts 32, changed" in tidemill(command, "run").out
    same = tidemill("reward", "rejudge", "run")  # by the run's own reward, as it is in the folder
    assert same.code == 0 and "32 attempts by rows:tasks" in same.out and "0 outcomes" in same.out
    assert tidemill("ledger", "run", "--json").code == 0


def test_it_lists_a_few_and_says_how_many_more(tidemill, folder: Path) -> None:
    said = tidemill("reward", "rejudge", "run", "--reward", "fixed.py:ranked").out
    assert "sample 0.1  reward 0.00" not in said and "→ reward 3.00" in said and "more; --json lists all" in said


def test_a_verifier_that_hangs_and_a_payload_that_is_lost(tidemill, folder: Path) -> None:
    segment = folder / "trajectories" / "seg-000001.bin"
    data = bytearray(segment.read_bytes())
    data[60] ^= 255
    segment.write_bytes(data)
    given = ("--reward", "fixed.py:slow", "scoring.limit_s=0.2", "--json")
    said = json.loads(tidemill("reward", "rejudge", "run", *given).out)
    assert (said["attempts"], said["unreadable"]) == (28, 1)
    assert {each["after"]["outcome"] for each in said["changed"]} == {"infra_error"}


def test_attempts_without_a_reply_keep_their_outcome_and_branches_are_judged_by_the_last(tidemill, folder: Path) -> None:
    with SqliteLedger(folder, mode="open") as ledger:
        loaded = ledger.load(1)
        first, ended = loaded.trajectories[0], (Finish.ENV_ERROR, Finish.CANCELLED, Finish.GIVEN)
        unasked = replace(first, mask=first.mask & False, versions=first.versions * 0 - 1, sources=(), sample=3)
        attempts = [replace(first, finish=finish, sample=i) for i, finish in enumerate(ended)]
        branches = [replace(first, sample=4, text="another"), replace(first, sample=4)]
        more = Group(
            ledger.next_group_id(), loaded.task, [*attempts, unasked, replace(unasked, outcome=None, sample=5), *branches]
        )
        ledger.admit(more.id, more.task)
        ledger.finish(more)
    said = json.loads(tidemill("reward", "rejudge", "run", "--reward", "fixed.py:ends_well", "--json").out)
    assert (said["attempts"], said["without_reply"]) == (33, 5)
    found = [
        (each["sample"], each["place"], each["after"]["reward"]) for each in said["changed"] if each["group_id"] == more.id
    ]
    assert found == [(4, 6, 7.0 + len(first.text))]


REFUSED = {
    "the environment decides": (["env=guess"], "decides on an attempt while it is played"),
    "no such file": (["--reward", "none.py:score"], "none.py"),
    "no such reward": (["--reward", "numerc"], "did you mean 'numeric'"),
    "a column that is not there": (["--reward", "fixed.py:needs"], "rubric"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_judge_is_refused(tidemill, folder: Path, what: str) -> None:
    arguments, sentence = REFUSED[what]
    said = tidemill("reward", "rejudge", "run", *arguments)
    assert said.code == 2 and sentence in said.out
    with SqliteLedger(folder, mode="read") as ledger:
        assert not ledger.events("rejudged")


def test_a_run_without_a_reward_has_to_be_given_one(tidemill, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learnt = SimpleNamespace(judged=False, offline="answers")
    monkeypatch.setattr(rejudge, "recipe_of", lambda folder, overrides: learnt)
    said = tidemill("reward", "rejudge", "run")
    assert said.code == 2 and "run has no reward: name the one that is to judge, with --reward" in said.out


def test_a_run_that_is_being_written_is_refused(tidemill, folder: Path) -> None:
    with SqliteLedger(folder, mode="open"):
        said = tidemill("reward", "rejudge", "run")
        assert said.code == 2 and "is being written by this process" in said.out


def test_pairs_are_of_the_latest_judgement(tidemill, folder: Path) -> None:
    from tidemill.cli.commands import pairs

    with SqliteLedger(folder, mode="open") as ledger:
        whole = [r for r in ledger.samples(order="recent", limit=99) if r.finish in pairs.WHOLE]
        by_group = {r.group_id: [x for x in whole if x.group_id == r.group_id] for r in whole}
        best, worst = next(rows for rows in by_group.values() if len(rows) > 1)[:2]
        judged = {g: {r.sample: Score(0.5) for r in rows} for g, rows in by_group.items()}
        judged[best.group_id] |= {best.sample: Score(2.0), worst.sample: Score(-1.0)}
        ledger.judge_again(judged, "by hand")
    assert tidemill("pairs", "run", "pairs.jsonl").code == 0
    (row,) = [json.loads(line) for line in (folder.parent / "pairs.jsonl").read_text().splitlines()]
    assert (row["chosen"].strip(), row["rejected"].strip()) == (best.text, worst.text)


def test_a_damaged_ledger_is_no_traceback(tidemill, folder: Path) -> None:
    with open(folder / "ledger.sqlite", "r+b") as file:
        file.write(b"\0" * 4096)
    with pytest.raises(LedgerError, match="no whole database"):
        tidemill("reward", "rejudge", "run")
