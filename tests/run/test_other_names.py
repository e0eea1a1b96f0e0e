"""Keys from other projects lead to ours, and keys of what does not exist yet say so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tidemill.core.errors import ConfigError
from tidemill.run.foreign_keys import ELSEWHERE, NOT_YET, NOT_YET_VALUES, OTHERS, TRL
from tidemill.run.recipe import RunConfig, load_recipe

BASE = {"run_dir": "runs/x", "model": "new:0.1m", "env": "guess"}
DOCS = Path(__file__).parents[2] / "docs"


def load(*overrides: str) -> RunConfig:
    return load_recipe([], overrides, BASE)


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(*overrides)
    return str(error.value)


def test_every_home_exists():
    """A key in quotes is one of a recipe; anything else is a line that a recipe takes."""
    for home in set(ELSEWHERE.values()):
        keys = re.findall("'(.*?)'", home)
        for key in keys:
            said = refused(f"{key}=[[]]")
            assert "unknown key" not in said and key in said, said
        if not keys and "FILE.py" not in home:
            load(home.partition(", or ")[0].replace(" = ", "=", 1))


def test_every_name_from_elsewhere_is_answered_and_documented():
    trl, others = ((DOCS / f"from_{name}.md").read_text() for name in ("trl", "others"))
    for names, page in ((TRL, trl), (OTHERS, others)):
        for name in names:
            assert f"`{name}`" in page, name
    for name, home in ELSEWHERE.items():
        for value in ("1", "true", "text"):
            assert refused(f"{name}={value}") == f"unknown key {name!r}; here it is {home}"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["peft.r=8"], "unknown key 'peft.r': a LoRA adapter is trained by trainer.lora.rank = 16"),
        (["lora.alpha=8"], "unknown key 'lora.alpha': a LoRA adapter is trained by"),
        (["trainer.lora.bias=all"], "trainer.lora.bias"),
        (["trainer.model.experimental.lora.rank=16"], "a LoRA adapter is trained by trainer.lora.rank"),
        (["actor_rollout_ref.model.lora_rank=8"], "a LoRA adapter is trained by trainer.lora.rank"),
        (["trainer.fsdp=true"], "unknown key 'trainer.fsdp': trainer.ranks says how many processes train together"),
        (["trainer=fsdp"], "trainer = 'fsdp': trainer.ranks says"),
        (["zero_stage=3"], "trainer.shard what each of them holds"),
        (["trainer.n_gpus_per_node=8"], "unknown key 'trainer.n_gpus_per_node': every visible CUDA device is used"),
        (["trainer.devices=[0]"], "unknown key 'trainer.devices'; here it is 'placement.devices'"),
        (["trainer.deepspeed=ds.json"], "trainer.kind = 'deepspeed' with trainer.shard = 'zero1' or 'zero2'"),
        (
            ["engine.tensor_parallel_size=2"],
            "unknown key 'engine.tensor_parallel_size': an engine of the kind 'native' has one",
        ),
        (["inference.parallel.tp=8"], "engine.kind = 'vllm' or 'sglang' with engine.tensor_parallel puts one on several"),
        (["engine.kind=tgi"], "engine.kind = 'tgi': engine.kind says which engine samples: 'native', 'vllm', 'sglang' or"),
        (["engine=sglang"], "engine = 'sglang': engine.kind says"),
        (["engine=vllm"], "engine = 'vllm': engine.kind says"),
        (["rollout.backend=vllm"], "unknown key 'rollout.backend': engine.kind says"),
        (["engine.kind=mine"], "engine.kind = 'mine': should be 'native'"),
        (["trainer.kind=mine"], "trainer.kind = 'mine': should be 'native'"),
        (["trainer.kind=fsdp"], "trainer.kind = 'fsdp': trainer.ranks says"),
        (
            ["placement.sync.transport=pigeon"],
            "placement.sync.transport = 'pigeon': should be 'shared_memory' or",
        ),
        (["placement=ray"], "placement.kind = 'ray': several machines do not exist yet"),
        (["placement.kind=ray"], "placement.kind = 'ray': several machines do not exist yet"),
        (["placement.nodes=2"], "unknown key 'placement.nodes': several machines do not exist yet"),
        (["trainer.nnodes=2"], "several machines do not exist yet"),
        (["engine.quantization=awq"], "quantised weights do not exist yet"),
        (["quantization=fp8"], "quantised weights do not exist yet"),
        (["trainer.optimizer=muon"], "other optimizers do not exist yet"),
        (["orchestrator.train.sampling.max_completion_tokens=9"], "here it is 'rollout.max_tokens'"),
        (["actor_rollout_ref.no.such=1"], "unknown key 'actor_rollout_ref.no.such': a key of verl's"),
        (
            ["algorithm.kl_ctrl.kl_coef=0.1", "algorithm.clip_high=0.3"],
            "'algorithm.kl_ctrl.kl_coef'; here it is algorithm.ref",
        ),
        (["trainer.lrr=1"], "unknown key 'trainer.lrr'; did you mean 'trainer.lr'?"),  # a slip stays a slip
        (["placement.kind=lokal"], "placement.kind = 'lokal': should be 'local' or 'inline'"),
    ],
)
def test_what_is_not_there_is_said(given, says):
    assert says in refused(*given)


@pytest.mark.parametrize(
    "name", ["trainer.total_epochs", "num_train_epochs", "num_episodes", "num_epochs", "trainer.epochs"]
)
def test_epochs_are_no_steps(name):
    """Whoever counts passes over the data learns which number of steps that is."""
    said = refused(f"{name}=3")
    assert "'steps'" in said and "'rollout.groups'" in said and "one pass over the tasks" in said


def test_a_pasted_table_is_explained_key_by_key():
    said = refused("actor_rollout_ref.actor.optim.lr=1e-6", "actor_rollout_ref.rollout.n=8", "data.train_batch_size=32")
    for home in ("'trainer.lr'", "'rollout.group_size'", "'rollout.groups'"):
        assert f"here it is {home}" in said
    many = refused(*(f"{name}=1" for name in OTHERS if name.startswith("actor_rollout_ref.")))
    assert many.count("here it is") == 5 and re.search(r"; and \d+ more$", many)


def test_no_key_of_ours_is_said_to_be_missing():
    ours = (Path(__file__).parents[1] / "options.txt").read_text().split()
    named = {*ELSEWHERE, *NOT_YET, *NOT_YET_VALUES} & {*ours}
    assert named <= {
        "placement.kind",
        "engine.kind",
        "trainer.kind",
        "env.reward",
    }  # some of whose values are not there
    assert load("placement.kind=inline").placement.kind == "inline"
    assert load("trainer.kind=deepspeed").trainer.kind_name == "deepspeed"
