"""One environment in TRL's own trainer and here: the same prompt, tool results, rewards, and the same tokens.

It needs TRL, and runs its trainer for one step on a tiny model; only sampling is replaced, by one script for both.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import ScriptedEngine, says
from trl_games import ROWS, Vault, few_tries, says_so

from tidemill.core.types import SamplingParams, Score
from tidemill.envs.chat import EpisodeChat, rollout_seeds
from tidemill.envs.tasks import task_of
from tidemill.envs.trl_environment import trl_environment
from tidemill.models.tokenizer import byte_tokenizer

trl = pytest.importorskip("trl")
CONTEXT = 4000


def calling(*calls: dict[str, Any]) -> str:
    made = [json.dumps({"name": each.pop("tool"), "arguments": each}) for each in calls]
    return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in made)


def scripts() -> list[list[str]]:
    """What is said in each of two attempts at each of two tasks."""
    right = {"tool": "turn", "digits": [3, 1, 4]}
    return [
        [calling({"tool": "turn", "digits": [3, 1, 5]}), calling(copy.copy(right), {"tool": "look"}), "it is open"],
        ["I give up"],
        [calling({"tool": "turn", "digits": [7, 2], "direction": "right"}), "done"],
        [calling({"tool": "look"}), calling({"tool": "look"}), calling({"tool": "turn", "digits": [1]}), "open?"],
    ]


def qwen_tokenizer() -> Any:
    added = ["<|endoftext|>", "<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>"]
    made = byte_tokenizer(*added)
    made.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3_instruct_2507.jinja").read_text()
    made.name_or_path = "tiny-qwen"
    return made


def played_by_trl(tmp_path: Path, tokenizer: Any) -> dict[str, Any]:
    """What TRL's trainer saw: completions, prompts and rewards of each function, and the tokens."""
    from datasets import Dataset
    from transformers import Qwen3Config, Qwen3ForCausalLM

    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 16}
    size |= {"num_key_value_heads": 1, "max_position_embeddings": CONTEXT, "vocab_size": len(tokenizer)}
    model = Qwen3ForCausalLM(Qwen3Config(**size, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id))
    model.name_or_path = "tiny"
    seen: dict[str, Any] = {}
    left = scripts()
    order: list[int] = []

    class Scripted(trl.GRPOTrainer):
        def _generate_single_turn(self, prompt_ids: Any, *rest: Any, **named: Any) -> Any:
            texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in prompt_ids]
            if not order:  # both attempts at a task stand beside each other, in the order that TRL drew
                tasks = [0 if "Open the vault" in text else 1 for text in texts]
                order.extend(2 * task + tasks[:place].count(task) for place, task in enumerate(tasks))
                self.attempts = list(range(len(texts)))
            said = [left[order[place]].pop(0) for place in self.attempts]
            self.attempts = [place for place, text in zip(self.attempts, said, strict=True) if "<tool_call>" in text]
            end = [tokenizer.eos_token_id]
            return [tokenizer.encode(text, add_special_tokens=False) + end for text in said], None

        def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, ids: Any) -> Any:
            rewards = super()._calculate_rewards(inputs, prompts, completions, ids)
            seen["completions"], seen["prompts"], seen["rewards"] = completions, prompts, rewards.tolist()
            seen["names"], seen["ids"] = self.reward_func_names, ids
            return rewards

        def _tokenize_prompts(self, prompts: Any) -> Any:
            seen["prompt_ids"], *rest = super()._tokenize_prompts(prompts)
            return seen["prompt_ids"], *rest

    arguments = trl.GRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        num_generations=2,
        max_steps=1,
        max_completion_length=CONTEXT,
        report_to=[],
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        disable_tqdm=True,
    )
    Scripted(
        model=model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(ROWS),
        reward_funcs=[few_tries, says_so],
        args=arguments,
        environment_factory=Vault,
    ).train()
    return {
        key: [values[order.index(place)] for place in range(4)] if key != "names" else values for key, values in seen.items()
    }


@pytest.mark.runs
async def test_one_environment_in_both(tmp_path: Path) -> None:
    tokenizer = qwen_tokenizer()
    theirs = played_by_trl(tmp_path, copy.deepcopy(tokenizer))
    seen: dict[str, list[Any]] = {"completions": [], "prompts": []}

    def watched(completions: list[Any], prompts: list[Any], **kwargs: Any) -> list[None]:
        seen["completions"] += completions
        seen["prompts"] += prompts
        return [None]

    env = trl_environment(Vault, tasks=ROWS, reward_funcs=[few_tries, says_so, watched])
    for place, said in enumerate(scripts()):
        engine = ScriptedEngine(says(tokenizer, *said))
        params = SamplingParams(stop_ids=(tokenizer.eos_token_id,), max_tokens=CONTEXT)
        chat = EpisodeChat(engine, tokenizer, params, context=CONTEXT, key="k", seeds=rollout_seeds(0, 0, place))
        outcome = await env.run(task_of(ROWS[place // 2], "row"), chat)
        assert isinstance(outcome, Score)
        expected = dict(zip(theirs["names"], theirs["rewards"][place], strict=True))
        assert outcome.parts == pytest.approx(expected)
        (row,) = chat.rows(outcome)
        assert row.tokens.tolist() == theirs["prompt_ids"][place] + theirs["ids"][place], tokenizer.decode(row.tokens)
    assert seen == {"completions": theirs["completions"], "prompts": theirs["prompts"]}
