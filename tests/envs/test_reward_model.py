"""A folder for sequence classification as a reward: its numbers are transformers', and it judges in the workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tidemill.core.errors import ConfigError
from tidemill.core.types import Finish, Score, Trajectory
from tidemill.envs.build_environment import make_environment
from tidemill.envs.environment_settings import RowsSettings
from tidemill.envs.reward_model import score
from tidemill.envs.reward_workers.reward_pool import RewardPool
from tidemill.models.hf_weights import load_folder
from tidemill.models.new_model import SIZES, fresh_model
from tidemill.models.value_model import ValueModel

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 :\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("reward_model")
    fresh_model(place / "model", alphabet=ALPHABET, context=64, **SIZES["0.1m"])
    model = ValueModel(load_folder(place / "model"))
    with torch.no_grad():
        model.head.weight.normal_(generator=torch.Generator().manual_seed(0))
    model.save(place / "scored", tokenizer_from=place / "model", dtype=torch.float32)
    return place / "scored"


def transformers_score(folder: Path, prompt: str, reply: str) -> float:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    ids = [*tokenizer.encode(prompt + "\n" + reply, add_special_tokens=False), tokenizer.eos_token_id]
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([ids])).logits[0, 0])


def test_its_numbers_are_those_of_transformers(folder):
    replies = ["four", "", "a much longer reply 12345"]
    found = score(replies, ["2 and 2:"] * 3, folder=str(folder))
    expected = [transformers_score(folder, "2 and 2:", reply) for reply in replies]
    assert found == pytest.approx(expected, rel=1e-4) and len({round(x, 3) for x in found}) == 3
    chats = [[{"role": "assistant", "content": reply}] for reply in replies]
    asked = [[{"role": "user", "content": "2 and 2:"}]] * 3
    assert score(chats, asked, folder=str(folder)) == found


def test_what_does_not_fit_its_context_is_no_score(folder):
    with pytest.raises(ValueError, match=r"an attempt is 84 tokens, and the context of .* holds 64"):
        score(["a" * 80], ["b:"], folder=str(folder))


async def test_a_recipe_names_it_and_it_judges_in_the_workers(folder, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"say {i}:"}) + "\n" for i in range(40)))
    settings = RowsSettings(data=str(data), reward="model", reward_options={"folder": str(folder)})
    pool = RewardPool(workers=1, limit_s=60)
    try:
        environment = make_environment(settings, pool)
        task = environment.tasks("train")[0]
        nothing = torch.zeros(0).numpy()
        attempts = [Trajectory(nothing, nothing, nothing, nothing, Finish.STOP, text=text) for text in ("four", "five")]
        for attempt in attempts:
            attempt.tokens, attempt.mask = nothing.astype("int32"), nothing.astype(bool)
        outcomes = await environment.judge(task, attempts)
    finally:
        await pool.close()
    values = [outcome.value for outcome in outcomes if isinstance(outcome, Score)]
    assert values == pytest.approx(score(["four", "five"], [task.prompt] * 2, folder=str(folder)), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"needs reward_options\.folder, the reward model's; given was None"),
        ({"folder": "nowhere"}, "nowhere: no config.json there"),
    ],
)
def test_a_folder_that_is_none_is_refused_before_anything_starts(tmp_path, options, message):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    with pytest.raises(ConfigError, match=message):
        make_environment(RowsSettings(data=str(data), reward="model", reward_options=options), RewardPool(workers=0))
