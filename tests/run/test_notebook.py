"""A notebook that defines its rewards and its environment in cells, and trains: executed by Jupyter's own kernel."""

from __future__ import annotations

import nbclient
import nbformat
import pytest

pytestmark = pytest.mark.runs

CELLS = [
    """
import re
import tidemill
from tidemill.models.new_model import SIZES, fresh_model

fresh_model("model", alphabet="abcdefghij=: ", context=32, **SIZES["0.1m"])
LETTER = re.compile("[a-j]")
rows = [{"prompt": f"{c}{sign}", "answer": c} for c in "abcdefghij" for sign in "=:"]
few = dict(steps=1, placement="inline", rollout={"groups": 2, "group_size": 4, "max_tokens": 2},
           eval={"tasks": 2, "final_tasks": 2})

def stripped(text):
    return text.strip()
""",
    """
def reward(completions, answer, **kwargs):
    import os
    assert os.environ.get("TIDEMILL_WORKER"), "it runs in a scoring worker"
    return [float(stripped(c) == a and bool(LETTER.match(c))) for c, a in zip(completions, answer)]

first = tidemill.train(env=reward, tasks=rows, model="model", run_dir="runs/first", quiet=True, **few)
assert first.report["judging"]["infra_errors"] == 0, first.report["judging"]
first
""",
    """
class Client:
    calls = 0

client = Client()

def asks(completion, answer):
    client.calls += 1
    return float(completion == answer)

second = tidemill.train(env=asks, tasks=rows, model="model", run_dir="runs/second", **few)
assert client.calls > 8 and second.report["judging"]["infra_errors"] == 0
""",
    """
@tidemill.environment(tasks=rows)
async def says(task, chat):
    import os
    assert os.environ.get("TIDEMILL_WORKER"), "it is played in an environment worker"
    return tidemill.Score(float(stripped(await chat.reply(task.prompt)) == task.data["answer"]))

third = tidemill.train(env=says, model="model", run_dir="runs/third", quiet=True, **few)
assert third.report["judging"]["infra_errors"] == 0, third.report["judging"]
""",
]


def text_of(cell) -> str:
    shown = [each.get("text") or each.get("data", {}).get("text/plain", "") for each in cell.outputs]
    return "\n".join(shown)


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    place = tmp_path_factory.mktemp("notebook")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    resources = {"metadata": {"path": str(place)}}
    nbclient.NotebookClient(book, timeout=150, startup_timeout=120, kernel_name="python3", resources=resources).execute()
    return place, book


def test_a_reward_of_a_cell_is_judged_in_the_workers_from_its_source(notebook):
    place, book = notebook
    assert text_of(book.cells[1]).startswith("run runs/first: 1 step, done\nheld-out accuracy 0.")
    source = (place / "runs" / "first" / "source" / "reward_reward.py").read_text()
    assert (
        "def stripped(text):" in source and "LETTER = re.compile('[a-j]', 32)" in source and "tidemill.train" not in source
    )


def test_a_reward_that_asks_a_live_client_runs_here_and_that_is_said(notebook):
    place, book = notebook
    assert (
        "reward asks runs in this process, as with scoring.workers = 0: it uses client, a Client of this process. Nothing "
        "kills it at scoring.limit_s, and what it crashes is the run"
    ) in " ".join(text_of(book.cells[2]).split())  # the display breaks lines
    assert not (place / "runs" / "second" / "source").exists()


def test_an_environment_of_a_cell_is_played_in_the_workers(notebook):
    place, _ = notebook
    source = (place / "runs" / "third" / "source" / "environment_says.py").read_text()
    assert "async def says" in source and "@tidemill.environment" not in source and "rows" not in source
