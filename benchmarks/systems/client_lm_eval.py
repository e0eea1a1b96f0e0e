"""EleutherAI's lm-evaluation-harness: generation and loglikelihoods, with a tokenizer of its own and with the server's."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from trials import FOLDER, KEY, MODEL, URL, trial

os.environ["OPENAI_API_KEY"] = KEY
import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

ROWS = [
    {"q": f"What is {a} + {b}?", "a": str(a + b), "choices": [str(a + b), str(a * b + 9)]}
    for a, b in ((2, 3), (4, 1), (5, 5))
]
Path("rows.json").write_text("\n".join(map(json.dumps, ROWS)))
COMMON: dict[str, Any] = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(Path("rows.json").resolve())}},
}
COMMON |= {"test_split": "test", "doc_to_text": "{{q}}"}
GENERATE = COMMON | {
    "task": "sums_generated",
    "output_type": "generate_until",
    "doc_to_target": "{{a}}",
    "generation_kwargs": {"until": ["\n", "Q:"], "max_gen_toks": 16, "do_sample": False},
    "metric_list": [{"metric": "exact_match"}],
}
CHOOSE = COMMON | {
    "task": "sums_chosen",
    "output_type": "multiple_choice",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": 0,
    "metric_list": [{"metric": "acc"}],
}
COMPLETIONS, CHATS = f"{URL}/v1/completions", f"{URL}/v1/chat/completions"
LOCAL = {"model": MODEL, "base_url": COMPLETIONS, "max_length": 512, "max_retries": 1}
TOKENIZERS = {
    "huggingface": {"tokenizer_backend": "huggingface", "tokenizer": FOLDER},
    "remote": {"tokenizer_backend": "remote", "auth_token": KEY},
    "none (texts)": {"tokenizer_backend": None, "tokenized_requests": False},
}


def evaluated(kind: str, tasks: list[dict[str, Any]], arguments: dict[str, Any], **more: Any) -> dict[str, Any]:
    found = lm_eval.simple_evaluate(
        model=kind, model_args=arguments, tasks=tasks, task_manager=TaskManager(), bootstrap_iters=0, **more
    )
    assert found and all(task["task"] in found["results"] for task in tasks)
    return found["results"]


@trial("local-completions, tokenizer_backend=huggingface: generate and choose")
def _() -> None:
    evaluated("local-completions", [GENERATE, CHOOSE], LOCAL | TOKENIZERS["huggingface"])


@trial("local-completions, tokenizer_backend=remote: generate and choose")
def _() -> None:
    evaluated("local-completions", [GENERATE, CHOOSE], LOCAL | TOKENIZERS["remote"])


@trial("local-completions, texts only: generate")
def _() -> None:
    evaluated("local-completions", [GENERATE], LOCAL | TOKENIZERS["none (texts)"])


@trial("local-completions: the loglikelihoods of both tokenizers are the same")
def _() -> None:
    asked = [Instance("loglikelihood", {}, (row["q"], " " + row["a"]), i) for i, row in enumerate(ROWS)]
    found = [
        lm_eval.api.registry.get_model("local-completions")(**LOCAL | TOKENIZERS[name]).loglikelihood(asked)
        for name in ("huggingface", "remote")
    ]
    assert found[0] == found[1] and all(value < 0 for value, _ in found[0])


@trial("local-completions, remote: rolling loglikelihood")
def _() -> None:
    model = lm_eval.api.registry.get_model("local-completions")(**LOCAL | TOKENIZERS["remote"])
    asked = [Instance("loglikelihood_rolling", {}, (" ".join(row["q"] for row in ROWS),), 0)]
    assert model.loglikelihood_rolling(asked)[0] < 0


@trial("local-completions, batches of 3")
def _() -> None:
    evaluated("local-completions", [CHOOSE], LOCAL | TOKENIZERS["huggingface"] | {"batch_size": 3})


@trial("local-completions with apply_chat_template")
def _() -> None:
    evaluated("local-completions", [GENERATE], LOCAL | TOKENIZERS["huggingface"], apply_chat_template=True)


@trial("local-chat-completions: generate")
def _() -> None:
    arguments = LOCAL | {"base_url": CHATS}
    evaluated("local-chat-completions", [GENERATE], arguments, apply_chat_template=True)
    evaluated(
        "local-chat-completions", [GENERATE], arguments | {"num_concurrent": 3}, apply_chat_template=True, num_fewshot=0
    )
