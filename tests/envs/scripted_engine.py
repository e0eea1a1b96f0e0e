"""An engine that says what it is told, and tokenizers small enough to build in a test."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tidemill.core.types import Completion, Finish, GenerateRequest, SamplingParams, Support, Version

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As some reasoning models do: what was thought in earlier turns is taken out again.
FORGETS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMS = CHATML.replace("{{ m['content'] }}", "{{ m['content'] | trim }}")


def chat_tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    """Byte-level BPE with a few merges, so that re-encoding text would give other tokens than were sampled."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(["user\nassistant\nsystem\nhello there, what is the answer? forty two, two"] * 4, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    made.chat_template = template
    made.name_or_path = "tiny-chat"
    return made


class ScriptedEngine:
    """`answer(prompt tokens, params)` gives the ids to sample; everything else of the record is made up, all different."""

    def __init__(
        self, answer: Callable[[np.ndarray, SamplingParams], Sequence[int]], *, context: int = 10_000, support: bool = False
    ):
        self._answer, self._context, self._support = answer, context, support
        self.prompts: list[np.ndarray] = []
        self.params: list[SamplingParams] = []
        self.completions: list[Completion] = []
        self.keys: set[str] = set()

    async def generate(self, request: GenerateRequest) -> Completion:
        tokens, params = request.tokens, request.params
        call = len(self.prompts)
        self.prompts.append(tokens.copy())
        self.params.append(params)
        self.keys.add(request.key)
        room = min(params.max_tokens, self._context - len(tokens))
        ids = np.array(list(self._answer(tokens, params))[:room], np.int32)
        n = len(ids)
        stopped = n > 0 and int(ids[-1]) in params.stop_ids
        full = n == self._context - len(tokens)
        versions = np.array([2 * call] * (n // 2) + [2 * call + 1] * (n - n // 2), np.int32)
        self.completions.append(
            Completion(
                tokens=ids,
                logprobs=-(np.arange(n, dtype=np.float32) + 1) / 100 - call,
                versions=versions,
                sources=tuple(Version(v) for v in sorted(set(versions.tolist()))),
                finish=Finish.STOP if stopped else Finish.CONTEXT if full else Finish.LENGTH,
                prompt_tokens=len(tokens),
                cached_tokens=3,
                support=_support(ids) if self._support else None,
            )
        )
        return self.completions[-1]


def _support(ids: np.ndarray) -> Support:
    """Position t could have been any of t % 3 + 1 tokens, the sampled one last."""
    rows = [[*range(500, 500 + t % 3), int(token)] for t, token in enumerate(ids)]
    return Support(np.array([i for row in rows for i in row], np.int32), np.cumsum([0, *map(len, rows)]).astype(np.int32))


def says(tokenizer, *replies: str, stop: bool = True) -> Callable[[np.ndarray, SamplingParams], list[int]]:
    """Answer with these texts in turn, each ended by the eos token."""
    left = list(replies)
    end = [tokenizer.eos_token_id] if stop else []
    return lambda tokens, params: tokenizer.encode(left.pop(0), add_special_tokens=False) + end
