"""What the commands say of a run that sampled nothing: what is true of it, and no figure of what was not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tidemill.cli.main import app
from tidemill.run.storage.run_folder import read_json

pytestmark = pytest.mark.runs

ROWS = [{"prompt": f"{a}{b}", "chosen": a, "rejected": b} for a in "abcd" for b in "efgh"]
RECIPE = """
model = "new:0.1m"
algorithm = "{algorithm}"
steps = 3
placement = "inline"
rollout = {{ groups = 2 }}
trainer.lr = 1e-2
eval = {{ every = 0, final_tasks = 8 }}
record.probe_every = 1
env = {{ kind = "rows", data = "{data}", eval_share = 0.4 }}
"""


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of DPO. Not to be changed."""
    folder = tmp_path_factory.mktemp("given")
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (folder / "recipe.toml").write_text(RECIPE.format(algorithm="dpo", data=folder / "rows.jsonl"))
    said = CliRunner().invoke(
        app, ["train", str(folder / "recipe.toml"), f"run_dir={folder / 'run'}"], catch_exceptions=False
    )
    assert said.exit_code == 0, said.stdout
    (folder / "said.txt").write_text(said.stdout)
    return folder / "run"


def test_what_is_said_while_it_runs(given: Path) -> None:
    said = (given.parent / "said.txt").read_text()
    first = next(line for line in said.splitlines() if line.strip().startswith("1 "))
    assert "loss 0.693" in first and "v0 ok" in first, said
    assert "nothing is sampled: 3 steps of 2 tasks × 2 = 4 samples" in said and "rows     rows up to 5 tokens" in said
    assert "held-out preference accuracy 0.000, preference loss 0.693 on" in said
    assert "held-out preference loss 0.693 → 0." in said and "None" not in said and "nan" not in said


def test_samples_tell_what_was_given_from_what_was_sampled(tidemill, given: Path) -> None:
    out = tidemill("samples", given, "--tokens").out
    assert "to be learnt" in out and "to be avoided" in out and "given" in out and "sampled" not in out
    found = json.loads(tidemill("samples", given, "--tokens", "--json").out)
    for each in found:
        kinds = [token["from"] for token in each["tokens"]]
        assert kinds == ["prompt"] * 3 + ["given"] * 2 and each["finish"] == "given"
        assert all(token["version"] is None and token["logprob"] is None for token in each["tokens"])


def test_the_ledger_shows_what_held_out_pairs_came_to(tidemill, given: Path) -> None:
    out = tidemill("ledger", given).out
    assert "6 admitted = 6 trained + 0 pending" in out and "no accuracy" not in out
    after = read_json(given / "report.json")["held_out_given"]["after"]
    assert f"preference accuracy {after['preference_accuracy']:.3f}" in out
    assert "reward_check" not in out, "there is no reward to check"


def test_there_is_nothing_to_replay_and_nothing_to_judge(tidemill, given: Path) -> None:
    replayed = json.loads(tidemill("parity", given, "--json").out)
    assert replayed["replay"]["ok"] and replayed["replay"]["replayed"] == 0 and replayed["ok"]
    assert "no weights sampled it: nothing to replay" in tidemill("parity", given).out
    recipe = given.parent / "recipe.toml"
    for said in (tidemill("eval", given), tidemill("reward", "test", recipe)):
        assert said.code == 2 and "env.reward" in said.out
    assert tidemill("why", given).code == 0


@pytest.mark.parametrize("name", ["sft", "dpo", "orpo", "kto"])
def test_explain_speaks_of_given_replies(tidemill, given: Path, name: str) -> None:
    out = tidemill("explain", given.parent / "recipe.toml", f"algorithm={name}", "rollout.groups=3").out
    kind, attempts = {"sft": ("answers", 3), "kto": ("labels", 3)}.get(name, ("pairs", 6))
    assert f"nothing: the tasks give the {kind}" in out and f"3 groups × {attempts // 3} = {attempts}" in out
    assert "nothing is stale" in out and "without a score" not in out and "mu stands in" not in out
    if name == "sft":
        assert "-log pi" in out and "advantage" not in out and "the tokens trained on" in out
    else:
        assert f"{attempts} attempts" in out and ("next one's reply" in out) == (name == "kto")
