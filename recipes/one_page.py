"""The whole of reinforcement learning for a language model on one page, synchronous, with the library's own parts.

    python recipes/one_page.py            a 0.1 M-parameter model learns to repeat a letter; ten seconds on a laptop

No processes, no buffer, no ledger: sample a batch, judge it, take one step, hand the new weights to the engine, again.
What Tidemill adds is that sampling and training run at the same time, and that nothing is lost or mixed up meanwhile.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from pathlib import Path

import numpy as np
import torch

from tidemill.algorithms.algorithm_settings import AlgorithmSettings
from tidemill.algorithms.prepare_step import ConfiguredAlgorithm
from tidemill.core.seeding import derive_seed
from tidemill.core.types import Completion, GenerateRequest, Group, SamplingParams, Score, Task, Trajectory, Version
from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.engine.native.native_engine import NativeEngine
from tidemill.models.hf_weights import load_folder
from tidemill.models.new_model import SIZES, fresh_model
from tidemill.models.tokenizer import load_tokenizer
from tidemill.trainer.native_trainer import NativeTrainer
from tidemill.trainer.trainer_kinds import TrainerSettings
from tidemill.weight_sync.sync_settings import SyncSettings
from tidemill.weight_sync.transport import make_receiver, make_sender

STEPS, GROUPS, SIZE = 60, 8, 8  # 8 prompts a step, 8 samples of each
LETTERS = "abcd"


def reward(prompt: str, reply: str) -> float:
    """Half for saying the letter, half for saying nothing else."""
    letter = prompt[0]
    return 0.5 * reply.startswith(letter) + 0.5 * (reply == letter)


async def sample(engine: NativeEngine, tokenizer, step: int, group_id: int) -> Group:
    """One prompt, SIZE completions, judged."""
    letter = random.Random(derive_seed(0, "task", step, group_id)).choice(LETTERS)
    prompt = f"{letter}="
    tokens = np.array(tokenizer.encode(prompt), np.int32)

    async def attempt(i: int) -> Completion:
        params = SamplingParams(max_tokens=3, seed=derive_seed(0, "rollout", step, group_id, i))
        return await engine.generate(GenerateRequest(tokens, params, key=f"{step}/{group_id}/{i}"))

    completions = await asyncio.gather(*(attempt(i) for i in range(SIZE)))
    task = Task(f"{step}/{group_id}", prompt)
    return Group(group_id, task, [record(i, tokens, c, prompt, tokenizer) for i, c in enumerate(completions)])


def record(attempt: int, prompt_tokens: np.ndarray, completion: Completion, prompt: str, tokenizer) -> Trajectory:
    """The record of a sampled reply: its tokens, and the logprob and version of each sampled one."""
    given, made = len(prompt_tokens), len(completion.tokens)
    text = tokenizer.decode(completion.tokens.tolist(), skip_special_tokens=True)
    return Trajectory(
        tokens=np.concatenate([prompt_tokens, completion.tokens]),
        mask=np.concatenate([np.zeros(given, bool), np.ones(made, bool)]),
        logprobs=np.concatenate([np.zeros(given, np.float32), completion.logprobs]),
        versions=np.concatenate([np.full(given, -1, np.int32), completion.versions]),
        finish=completion.finish,
        sample=attempt,
        outcome=Score(reward(prompt, text)),
        sources=completion.sources,
        text=text,
    )


async def main(folder: Path) -> list[float]:
    model = folder / "model"
    fresh_model(model, alphabet=LETTERS + "=", context=16, **SIZES["0.1m"])
    tokenizer = load_tokenizer(model)

    # Trainer and engine: two copies of one decoder, joined by a transport of weights.
    sync = SyncSettings()
    trainer = NativeTrainer(
        load_folder(model), TrainerSettings(lr=3e-3), steps=STEPS, sender=make_sender(sync, folder), source=model
    )
    engine = NativeEngine(
        load_folder(model),
        EngineSettings(max_sequences=GROUPS * SIZE),
        receiver=make_receiver(sync.transport),
        version=Version(-1),
        name="engine",
        eos_ids=(tokenizer.eos_token_id,),
    )
    algorithm = ConfiguredAlgorithm(AlgorithmSettings.preset("grpo"), max_tokens=3)

    rewards = []
    for step in range(STEPS):
        await engine.update(await trainer.publish(Version(step)))  # staged, verified by fingerprint, committed
        groups = await asyncio.gather(*(sample(engine, tokenizer, step, g) for g in range(GROUPS)))
        rows = algorithm.rows(groups, step)
        prepared = algorithm.prepare(groups, step, rows, {})  # advantages, weights, and the one scale of the step
        result = await trainer.forward_backward(prepared.samples, prepared.losses)
        metrics = await trainer.apply(prepared.updates[0].scale)
        rewards.append(float(np.mean([g.rewards.mean() for g in groups])))
        gap = max(np.abs(s.logprobs - lp)[s.mask].max() for s, lp in zip(prepared.samples, result.logprobs, strict=True))
        if step % 5 == 0 or step == STEPS - 1:
            norm = metrics["grad_norm"]
            print(f"step {step:3}  reward {rewards[-1]:.2f}  |engine - trainer| {gap:.0e}  gradient {norm:.2f}")

    await trainer.export(str(folder / "final"))  # a Hugging Face folder
    await engine.close()
    await trainer.close()
    return rewards


if __name__ == "__main__":
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as scratch:
        asyncio.run(main(Path(scratch)))
