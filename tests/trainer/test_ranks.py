"""Gradients of several ranks, each a process, equal those of one (I6)."""

from typing import Any

import pytest
from rank_processes import together

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
WITHIN = {"float64": 1e-12, "float32": 2e-6}
NARROW = {"int8": 0.02, "bfloat16": 5e-3}  # of sums over replicas, in the first update
KINDS = {"none": (2, 4), "zero2": (2, 4), "zero3": (2, 4), "hsdp": (4,)}


def cases(size):
    """Every kind of sharding with every preset; with every family; and what is special about rows."""
    for shard, sizes in KINDS.items():
        if size not in sizes:
            continue
        for dtype in WITHIN:
            for rows in ("grpo", "gspo", "ppo", "dpo", "sft", "ragged", "one row"):
                yield {"shard": shard, "dtype": dtype, "rows": rows}
            for family in FAMILIES:
                for tied in (True, False):
                    model = {"model_type": family, "tie_word_embeddings": tied}
                    yield {"shard": shard, "dtype": dtype, "rows": "grpo", "model": model, "checkpointing": not tied}
            yield {"shard": shard, "dtype": dtype, "rows": "ppo", "head": True, "checkpointing": True}
            yield {"shard": shard, "dtype": dtype, "rows": "grpo", "lora": True, "checkpointing": size == 4}
            yield {"shard": shard, "dtype": dtype, "rows": "grpo", "lora": True, "dropout": 0.4, "checkpointing": size == 2}
            yield {"shard": shard, "dtype": dtype, "rows": "ppo", "lora": True}
            yield {"shard": shard, "dtype": dtype, "rows": "ppo", "lora": True, "head": True, "checkpointing": False}
        for reduce in NARROW if shard in ("none", "hsdp") else ():
            yield {"shard": shard, "dtype": "float32", "rows": "ppo", "reduce": reduce}


def name_of(case):
    return "-".join(str(v) if not isinstance(v, dict) else "-".join(map(str, v.values())) for v in case.values())


FEW: list[tuple[int, dict[str, Any]]] = [
    (2, {"shard": shard, "dtype": "float64", "rows": rows}) for shard in ("zero2", "zero3") for rows in ("ppo", "ragged")
]
FEW.append((2, {"shard": "zero3", "dtype": "float64", "rows": "grpo", "lora": True, "checkpointing": False}))
FEW.append((2, {"shard": "zero3", "dtype": "float64", "rows": "grpo", "lora": True, "base": "nf4", "checkpointing": True}))
FEW.append((2, {"shard": "zero3", "dtype": "float32", "rows": "ppo", "lora": True}))
FEW.append((2, {"shard": "zero3", "dtype": "float64", "rows": "grpo", "lora": True, "dropout": 0.4, "checkpointing": True}))
FEW.append((2, {"shard": "none", "dtype": "float32", "rows": "ppo", "reduce": "int8"}))
ALL = [(size, case) for size in (2, 4) for case in cases(size)]


@pytest.fixture(scope="module")
def answers(request, tmp_path_factory):
    """All ranks' answers by (ranks, name of the case). Real processes compute those of the tests that were chosen, once."""
    chosen = {item.callspec.id: item.callspec.params for item in request.session.items if "answers" in item.fixturenames}
    found = {}
    for size in {params["size"] for params in chosen.values()}:
        asked = [params["case"] for params in chosen.values() if params["size"] == size]
        for case, each in zip(asked, together(tmp_path_factory.mktemp(f"ranks-{size}"), size, asked), strict=True):
            found[size, name_of(case)] = each
    return found


def check(answers, size, case):
    for answer in answers[size, name_of(case)]:
        assert answer is not None, "the rank ended before it came to this case"
        within = NARROW[case["reduce"]] if "reduce" in case else WITHIN[case["dtype"]]
        assert answer["error"] <= within and answer["worst"] <= 5 * within, answer
        assert "reduce" not in case or answer["error"] > WITHIN["float32"], "nothing was rounded"


def name(value):
    return name_of(value) if isinstance(value, dict) else str(value)


@pytest.mark.runs
@pytest.mark.parametrize("size, case", FEW, ids=name)
def test_some_gradients_are_those_of_one_rank(answers, size, case):
    check(answers, size, case)


@pytest.mark.ranks
@pytest.mark.parametrize("size, case", [each for each in ALL if each not in FEW], ids=name)
def test_every_gradient_is_that_of_one_rank(answers, size, case):
    check(answers, size, case)


@pytest.mark.ranks
@pytest.mark.parametrize("size", [4])
@pytest.mark.parametrize("case", [{"shard": "hsdp", "then": each} for each in ("hsdp", "none")], ids=name)
def test_what_ranks_owe_moves_with_their_checkpoint(answers, size, case):
    for answer in answers[size, name_of(case)]:
        assert answer is not None and answer["error"] <= 1e-6
        assert answer["same"] == (case["then"] == "hsdp")
