"""`tidemill check`: what a step comes to and whether it fits; what `train` would refuse is refused, in its words."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tidemill.cli import main
from tidemill.engine.native import cache_size
from tidemill.run.planner import memory_model
from tidemill.run.recipe import load_recipe

pytestmark = pytest.mark.runs

TOO_LARGE = ("trainer.micro_batch_tokens=1000000000", "rollout.groups=100000")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text('model = "new:0.1m"\nenv = "guess"\nalgorithm = "grpo"\nrollout.max_tokens = 6\n')
    return path


def with_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(cache_size, "memory_bytes", lambda: (free, free))


def test_what_fits_is_shown_as_explain_shows_it_and_nothing_is_written(tidemill, recipe: Path, monkeypatch):
    with_free(monkeypatch, 1 << 30)
    monkeypatch.chdir(recipe.parent)
    said, explained = (tidemill(command, recipe, "placement.engines=2") for command in ("check", "explain"))
    assert said.code == 0 and [path.name for path in recipe.parent.iterdir()] == [recipe.name]
    lines, verdict = said.out.splitlines()[:-1], said.out.splitlines()[-1]
    assert lines[0] == "a step" and "the run" in lines and "memory, an estimate" in lines
    unwrapped = " ".join(" ".join(lines).split())
    assert unwrapped in " ".join(explained.out.split())
    for what in ("activations of at most", "KV cache", "Python itself", "MiB more", "of 1.0 GiB that are free"):
        assert what in unwrapped
    table = next(i for i, line in enumerate(lines) if line.split() == ["process", "number", "each", "most", "of", "it"])
    assert [line.split()[:2] for line in lines[table + 1 : table + 3]] == [["trainer", "1"], ["engine", "2"]]
    assert "16 groups × 8 = 128" in unwrapped and all(line == line.rstrip() for line in lines)
    assert verdict.split()[:2] == ["fits", "yes:"] and "on cpu has to be free" in verdict
    assert "advantage" not in said.out  # formulas are what `explain` is for


FILE = """
import tidemill

tasks = [{"prompt": str(i), "answer": str(i)} for i in range(40)]

@tidemill.environment(tasks=tasks)
async def plays(task, chat):
    return 1.0

def judges(completion, **_):
    return 1.0
"""
AGENT = 'env={kind="agent", command="true", data="FILE.py:tasks", lifetime="%s"}'


@pytest.mark.parametrize(
    ("given", "counts", "beside"),
    [
        ([AGENT % "run"], {"environment": 2, "agent": 2}, False),
        ([AGENT % "run", "placement.environment.workers=0"], {"agent": 1}, False),
        ([AGENT % "episode", "placement.environment.workers=3"], {"environment": 3}, True),
        (['env={kind="python", path="FILE.py:plays"}'], {"environment": 2}, False),
        (['env={kind="python", path="FILE.py:judges"}'], {}, False),
        (["placement.environment.workers=4"], {"environment": 4}, False),
        ([], {}, False),
    ],
    ids=["agent", "agent here", "agent of an episode", "environment", "reward", "built-in in workers", "built-in"],
)
def test_what_plays_is_counted(tidemill, recipe: Path, monkeypatch, given: list[str], counts: dict[str, int], beside: bool):
    with_free(monkeypatch, 1 << 30)
    monkeypatch.chdir(recipe.parent)
    Path("FILE.py").write_text(FILE)
    found = json.loads(tidemill("check", recipe, *given, "--json").out)["memory"]["processes"]
    assert {name: found[name]["count"] for name in ("environment", "agent") if name in found} == counts
    said = " ".join(tidemill("check", recipe, *given).out.split())
    assert ("beside it: a process of the agent's command for each episode under way, and what" in said) is beside


def test_it_tells_machines_the_same_numbers(tidemill, recipe: Path, monkeypatch):
    with_free(monkeypatch, 1 << 30)
    found, explained = (json.loads(tidemill(command, recipe, "--json").out) for command in ("check", "explain"))
    assert found.pop("fits") is True
    assert found == {key: explained[key] for key in found} and {"step", "slots", "memory"} <= found.keys()
    device = found["memory"]["devices"]["cpu"]
    assert device["free"] == 1 << 30
    kv = next(size for what, size in found["memory"]["processes"]["engine"]["bytes"].items() if what.startswith("KV"))
    assert device["needed"] == device["total"] - kv  # a cache makes do with what there is


def test_what_cannot_fit_is_refused_as_train_refuses_it(tidemill, recipe: Path, monkeypatch):
    async def begun(session: object) -> None:
        raise AssertionError("it would have trained, and taken all the memory there is")

    monkeypatch.setattr("tidemill.run.session.Session.start", begun)
    with_free(monkeypatch, 1 << 30)
    folder = f"run_dir={recipe.parent / 'run'}"
    here, ended = (
        tidemill("check", recipe, *TOO_LARGE, "placement=inline"),
        tidemill("train", recipe, *TOO_LARGE, folder, "placement=inline"),
    )
    assert here.code == ended.code == 2 and ended.out.startswith(f"{here.out}. What takes the most first: ")
    refused = tidemill("check", recipe, *TOO_LARGE)
    elsewhere = tidemill("train", recipe, *TOO_LARGE, folder)  # looks in a process of its own, at what is free in truth
    assert elsewhere.code == 2
    said = re.sub("and .{,12} is free", "and 1.0 GiB is free", elsewhere.out)
    said = re.sub(r" It would fit with .*?\. What", " What", said)  # with what is free in truth
    assert said.startswith(f"{refused.out}. ") and "a lower trainer.micro_batch_tokens (now 1,000,000,000)" in said
    printed = []
    monkeypatch.setattr("tidemill.cli.commands.check.print_json", printed.append)
    assert tidemill("check", recipe, *TOO_LARGE, "--json").code == 2
    assert printed[0]["fits"] is False and printed[0]["memory"]["too_large"] == refused.out
    assert printed[0]["memory"]["refused"] == said


def test_what_cannot_fit_is_a_table_and_one_line(recipe: Path, monkeypatch, capsys):
    """No wall: what is too large in one line, what would help above it, and that there is one machine."""
    with_free(monkeypatch, 1 << 30)
    monkeypatch.setattr("sys.argv", ["tidemill", "check", str(recipe), *TOO_LARGE])
    with pytest.raises(SystemExit) as ended:
        main.main()
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.err.count("\n") == 1 and len(said.err) < 200
    assert re.fullmatch(
        r"error: this recipe needs \S+ GiB of memory on cpu, and 1.0 GiB is free; the most is \S+ GiB of the trainer: "
        r"activations of at most [\d,]+ tokens\n",
        said.err,
    )
    rows = said.out[said.out.index("  fits ") :]
    assert rows.split()[:2] == ["fits", "no"] and "a lower trainer.micro_batch_tokens" in rows
    assert rows.rstrip().endswith("this machine is the end: a run on several does not exist yet")
    assert said.out.count("\n") < 35 and max(map(len, said.out.splitlines())) <= 120


def test_the_last_byte_decides(tidemill, recipe: Path, monkeypatch):
    config = load_recipe([recipe])
    arch = memory_model.architecture_of(config.model)
    assert arch is not None
    needed = memory_model.demands(memory_model.processes(config, memory_model.Models.of(config, arch)))["cpu"].needed
    for free, code in ((needed, 0), (needed - 1, 2)):
        with_free(monkeypatch, free)
        assert tidemill("check", recipe).code == code


@pytest.mark.parametrize(("asked", "cut"), [(512, False), (513, True)])
def test_a_context_that_the_model_lacks_is_said_to_be_cut(tidemill, recipe: Path, asked: int, cut: bool):
    given, said = (
        f"engine.context={asked}",
        "engine.context = 513, but the model has 512 positions (max_position_embeddings): 512 are used",
    )
    checked = tidemill("check", recipe, given)
    assert (said in " ".join(checked.out.split())) is cut and "rows of at most 512 tokens" in checked.out
    short = ("steps=1", "eval.final_tasks=2", "rollout.groups=1", "placement=inline", f"run_dir={recipe.parent / 'run'}")
    trained = tidemill("train", recipe, given, *short)
    assert trained.code == 0 and (said in " ".join(trained.out.split())) is cut


@pytest.mark.parametrize(
    "given",
    ["model=nowhere", "algorithm={name='opd', reference={model='nowhere'}}", "stepz=3", "algorithm.cap=3", "model=new:3m"],
)
def test_a_recipe_that_would_not_run_is_refused_with_trains_sentence(tidemill, recipe: Path, given: str):
    refused, ended = tidemill("check", recipe, given), tidemill("train", recipe, given, f"run_dir={recipe.parent / 'run'}")
    assert refused.code == ended.code == 2 and refused.out == ended.out


def test_a_row_beyond_a_micro_batch_is_thought_of(tidemill, recipe: Path, monkeypatch):
    """`train` knows the longest row and counts it; without the tasks there is a bound, and whether it would fit."""
    given = ("trainer.micro_batch_tokens=32", "rollout.groups=2")
    small = json.loads(tidemill("check", recipe, *given, "--json").out)["memory"]
    with_free(monkeypatch, small["devices"]["cpu"]["needed"])
    said = " ".join(tidemill("check", recipe, *given).out.split())
    assert "fits yes" in said and "but a task with a row of" in said and "engine.context" in said
    with_free(monkeypatch, 1 << 40)
    assert "a task with a row" not in tidemill("check", recipe, *given).out


def folder_of(path: Path) -> Path:
    from tidemill.models.new_model import SIZES, fresh_model

    fresh_model(path, alphabet="abcdefghij0123456789 :<>", context=64, **SIZES["0.1m"])
    return path


def other_shapes(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"intermediate_size": raw["intermediate_size"] - 1}))


def failing_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no user may speak') }}")


BROKEN = {
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "no safetensors weights there"),
    "cut off": (lambda folder: os.truncate(folder / "model.safetensors", 200_000), "is not a readable safetensors file"),
    "a pipe": (
        lambda folder: ((folder / "model.safetensors").unlink(), os.mkfifo(folder / "model.safetensors")),
        "model.safetensors is a pipe or device",
    ),
    "other shapes": (other_shapes, "_proj.weight: shape .* is expected"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer there"),
    "a template that fails": (failing_template, "its chat template fails on a single user message .*no user may speak"),
}


WHOSE = {  # what names a folder -> settings for two folders, a good one and that one; what is not read of it
    "model": (lambda good, bad: [f"model={bad}"], ()),
    "reference": (
        lambda good, bad: [f"model={good}", f"algorithm.reference.model={bad}", "algorithm.reference.kl=0.1"],
        ("no tokenizer", "a template that fails"),
    ),
    "critic": (
        lambda good, bad: [f"model={good}", f"algorithm={{name='ppo', critic={{model='{bad}'}}}}"],
        ("no tokenizer", "a template that fails"),
    ),
    "reward": (
        lambda good, bad: [
            f"model={good}",
            f"env={{kind='rows', data='tasks.jsonl', reward='model', reward_options={{folder='{bad}'}}}}",
        ],
        ("a template that fails",),
    ),
}


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("whose", WHOSE)
def test_a_folder_that_train_could_not_read_does_not_fit(tidemill, recipe: Path, whose: str, case: str, monkeypatch):
    with_free(monkeypatch, 1 << 30)
    (damage, message), (settings, unread) = BROKEN[case], WHOSE[whose]
    good, bad = folder_of(recipe.parent / "good"), folder_of(recipe.parent / "bad")
    given = settings(good, bad)
    assert tidemill("check", recipe, *given).code == 0
    damage(bad)
    said = tidemill("check", recipe, *given)
    if case in unread:
        return
    assert said.code != 0 and re.search(message, " ".join(said.out.split()))
