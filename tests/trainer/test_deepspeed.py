"""A trainer of two ranks on DeepSpeed computes what the native trainer of one rank does (I6).

The processes run in an environment of their own: `make test-deepspeed` builds it.
"""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from deepspeed_cases import dealt_rows, losses_of, trainer_on
from safetensors.torch import load_file
from trainer_cases import CPU, decoder, gradients

from tidemill.core.errors import ConfigError
from tidemill.core.types import Version
from tidemill.trainer.deepspeed_engine import DeepSpeedRanks
from tidemill.trainer.trainer_kinds import DeepSpeedSettings, TrainerSettings

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".peers" / "deepspeed" / "bin" / "python"
BUILT = pytest.mark.skipif(not PYTHON.exists(), reason="no environment with DeepSpeed: `make test-deepspeed` builds it")
SIZE, SCALE = 2, 1 / 50
SETTINGS = {"lr": 0.01, "weight_decay": 0.1, "micro_batch_tokens": 60, "schedule": "cosine", "warmup_steps": 2}


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(ConfigError, match=r"pip install 'tidemill\[deepspeed\]', or trainer.kind = 'native'"):
        DeepSpeedRanks(0, DeepSpeedSettings(), CPU, "")


def exact(stage, rows, **model):
    """A case whose first moments are the gradients: without decay of what was, clipping or scale."""
    settings = {"shard": f"zero{stage}", "betas": [0, 0.999], "max_grad_norm": 0, "micro_batch_tokens": 40}
    settings["checkpointing"] = model.pop("checkpointing", False)
    return {"settings": settings, "rows": rows, **model}


GRADIENTS = {
    f"zero{stage}-{name}": exact(stage, **case)
    for stage in (1, 2)
    for name, case in {
        "several calls": {"rows": ["0", "1"]},
        "untied, recomputed": {"rows": ["1"], "tied": False, "checkpointing": True},
        "an empty rank": {"rows": ["one"]},
        "one row": {"rows": ["few", "0"]},
    }.items()
}
STEPS = {
    f"zero{stage}-{name}": {"settings": {**SETTINGS, "shard": f"zero{stage}"}, **case}
    for stage in (1, 2)
    for name, case in {"policy": {}, "critic and reference": {"companions": True, "tied": False}}.items()
}


def held(folder):
    """All tensors of a checkpoint, by name, whoever of the ranks wrote them."""
    return {name: tensor for file in sorted(Path(folder).glob("*.safetensors")) for name, tensor in load_file(file).items()}


def apart(found, expected):
    """The norm of the difference over that of what is expected."""
    assert set(found) == set(expected), set(found) ^ set(expected)
    missed = sum(float((found[name].double() - whole.double()).square().sum()) for name, whole in expected.items())
    return (missed / sum(float(whole.double().square().sum()) for whole in expected.values())) ** 0.5


def together(folder, cases):
    """The answers of all ranks to each case."""
    program = [PYTHON, Path(__file__).with_name("deepspeed_program.py"), folder / "meeting"]
    (folder / "cases").write_text("".join(json.dumps(case) + "\n" for case in cases))
    processes = []
    try:
        for rank in range(SIZE):
            with open(folder / "cases") as given, open(folder / f"out-{rank}", "w") as out:
                processes.append(subprocess.Popen([*program, str(rank), str(SIZE)], stdin=given, stdout=out))
        for process in processes:
            process.wait(timeout=600)
    finally:
        for process in processes:
            process.kill()
            process.wait(timeout=30)
    lines = [(folder / f"out-{rank}").read_text().splitlines() for rank in range(SIZE)]
    assert all(len(each) == len(cases) for each in lines), "a rank ended early"
    return [[json.loads(each[i]) for each in lines] for i in range(len(cases))]


def native(settings, case, *does):
    """A native trainer of one rank does this: rows, a path to load, or a path to save to."""
    own = {name: value for name, value in settings.items() if name != "shard"}
    trainer = trainer_on(TrainerSettings(device="cpu", **own), case)

    async def act():
        for what in does:
            if isinstance(what, str):
                await trainer.forward_backward(dealt_rows(what, 1)[0], losses_of(case))
                applied.append(await trainer.apply(SCALE))
            elif (what / "trainer.json").exists():
                await trainer.load(str(what))
            else:
                await trainer.snapshot()
                await trainer.save(str(what))
        if case.get("folder"):
            applied.append((await trainer.publish(Version(3))).version.fingerprint)
        await trainer.close()

    applied = []
    asyncio.run(act())
    return applied


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """The folder in which each case has one, and all answers by name of the case."""
    folder = tmp_path_factory.mktemp("deepspeed")
    asked = {}
    for name, case in GRADIENTS.items():
        rows = [["rows", each] for each in case["rows"]]
        asked[name] = {**case, "do": [*rows, ["apply", 1.0], ["save", str(folder / name)]]}
    for name, case in STEPS.items():
        native(case["settings"], case, "5", "6", folder / f"{name}-native")
        first = [["rows", "0"], ["apply", SCALE]]
        both = [*first, ["rows", "1"], ["rows", "none"], ["apply", SCALE], ["save", str(folder / f"{name}-2")]]
        third = [["rows", "2"], ["apply", SCALE], ["save", str(folder / f"{name}-3")], ["publish", 3]]
        again = [["rows", "7"], ["load", str(folder / f"{name}-2")], *third[:2], ["save", str(folder / f"{name}-again")]]
        other = [["load", str(folder / f"{name}-native")], *third[:2], ["save", str(folder / f"{name}-other")]]
        (sent := folder / f"{name}-sent").mkdir()
        asked[name] = {**case, "folder": str(sent), "do": [*both, *third, *again, *other]}
    return folder, dict(zip(asked, together(folder, asked.values()), strict=True))


@BUILT
@pytest.mark.deepspeed
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_those_of_one_rank(answers, name):
    folder, found = answers
    case, expected = GRADIENTS[name], {}
    for rows in case["rows"]:
        more, _ = gradients(dealt_rows(rows, 1)[0], decoder(tie_word_embeddings=case.get("tied", True)))
        expected = {key: value + expected.get(key, 0) for key, value in more.items()}
    first = {key: value for key, value in held(folder / name).items() if key.startswith("exp_avg.")}
    assert apart(first, {f"exp_avg.{key}": value for key, value in expected.items()}) <= 2e-6
    norm = sum(float(value.double().square().sum()) for value in expected.values()) ** 0.5
    for answer in found[name]:
        assert answer[-1]["grad_norm"] == pytest.approx(norm, rel=2e-6)


@BUILT
@pytest.mark.deepspeed
@pytest.mark.parametrize("name", STEPS)
def test_steps_are_those_of_the_native_trainer(answers, name):
    """Clipped and with decay, with a schedule, a critic and a reference that moves; and what either saved, both load."""
    folder, found = answers
    case, (mine, others) = STEPS[name], found[name]
    applied = [each for each in mine if "grad_norm" in each]
    assert applied == [each for each in others if "grad_norm" in each]
    alone = folder / f"{name}-alone"
    expected = native(case["settings"], case, "0", "1", "2", alone)
    for got, want in zip(applied, expected, strict=False):
        assert got == pytest.approx(want, rel=1e-5)
    assert want["grad_norm"] > 1, "nothing was clipped"
    assert want.get("critic/grad_norm", 2) > 1, "the critic had no gradient"
    assert differs(folder / f"{name}-3", alone) <= 1e-6
    assert applied[3] == applied[2] and held_alike(folder / f"{name}-again", folder / f"{name}-3")
    native(case["settings"], case, folder / f"{name}-2", "2", alone.with_name(f"{name}-from-2"))
    assert differs(folder / f"{name}-3", alone.with_name(f"{name}-from-2")) <= 1e-6
    native(case["settings"], case, folder / f"{name}-native", "2", alone.with_name(f"{name}-from-native"))
    assert differs(folder / f"{name}-other", alone.with_name(f"{name}-from-native")) <= 1e-6


@BUILT
@pytest.mark.deepspeed
@pytest.mark.parametrize("name", STEPS)
def test_what_is_published_is_what_was_saved(answers, name, tmp_path):
    folder, found = answers
    sent = [next(each for each in answer if "fingerprint" in each) for answer in found[name]]
    case = {**STEPS[name], "folder": str(tmp_path)}
    [fingerprint] = native(case["settings"], case, folder / f"{name}-3")
    assert [each["fingerprint"] for each in sent] == [fingerprint] * SIZE
    model = decoder(tie_word_embeddings=case.get("tied", True))
    assert sum(each["bytes"] for each in sent) == sum(4 * p.numel() for p in model.parameters()), "each tensor once"
    assert min(each["bytes"] for each in sent) > 0


def learnt(folder):
    """Weights and moments of a checkpoint; no random states."""
    return {name: tensor for name, tensor in held(folder).items() if not name.startswith("random.")}


def differs(folder, other):
    return apart(learnt(folder), learnt(other))


def held_alike(folder, other):
    mine, theirs = learnt(folder), learnt(other)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@BUILT
@pytest.mark.deepspeed
def test_the_demo_trains(tmp_path):
    """Two ranks, real engines, a warm-up, evaluations and checkpoints; and the run can be resumed."""
    train = [PYTHON, "-m", "tidemill", "train", ROOT / "recipes" / "demo.toml", f"run_dir={tmp_path / 'run'}"]
    given = ["trainer.kind=deepspeed", "trainer.ranks=2", "warmup.accuracy=0.2", "eval.tasks=64"]
    for steps in (3, 4):
        done = subprocess.run([*train, *given, f"steps={steps}"], capture_output=True, text=True, timeout=600, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"{steps} steps" in done.stdout and "0 lost" in done.stdout, done.stdout
