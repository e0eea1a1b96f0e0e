"""What presets of given replies do to a model: the trainer's gradient against each formula in torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from tidemill.algorithms.algorithm_settings import AlgorithmSettings
from tidemill.algorithms.prepare_step import ConfiguredAlgorithm
from tidemill.algorithms.presets import PRESETS
from tidemill.controller.offline_groups import OfflineRoller
from tidemill.controller.train_step import train_on
from tidemill.core.types import Group, Task
from tidemill.models.architecture import Architecture
from tidemill.models.decoder import Decoder
from tidemill.models.tokenizer import character_tokenizer
from tidemill.models.value_model import ValueModel
from tidemill.trainer.companions import Critic, Reference
from tidemill.trainer.native_trainer import NativeTrainer
from tidemill.trainer.trainer_kinds import TrainerSettings

TOKENIZER = character_tokenizer("abcdefgh=\n")
PRESETS_OF_GIVEN = [name for name, values in PRESETS.items() if "given" in values]
PAIRS = [("ab=", "a", "hhh"), ("cd=", "cc", "d"), ("ef=h", "efef", "e")]
LABELLED = [("ab=", "a", True), ("cd=e", "dcd", False), ("ef=", "ef", True), ("g=", "b", False)]


def decoder(seed: int) -> Decoder:
    raw = {"model_type": "qwen3", "vocab_size": len(TOKENIZER), "hidden_size": 16, "num_hidden_layers": 2}
    raw |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 24}
    model = Decoder(Architecture.from_dict(raw | {"max_position_embeddings": 64, "tie_word_embeddings": True}))
    model.initialise(torch.Generator().manual_seed(seed), std=0.5)
    return model


def tasks(name: str) -> list[Task]:
    if name == "kto":
        return [Task(f"t{i}", p, {"completion": c, "label": good}) for i, (p, c, good) in enumerate(LABELLED)]
    if name == "sft":
        return [Task(f"t{i}", p, {"completion": w, "rejected": r}) for i, (p, w, r) in enumerate(PAIRS)]
    return [Task(f"t{i}", p, {"chosen": w, "rejected": r}) for i, (p, w, r) in enumerate(PAIRS)]


async def groups(name: str, settings: AlgorithmSettings) -> list[Group]:
    roller = OfflineRoller(settings.given, TOKENIZER)
    return [await roller.rollout(i, task) for i, task in enumerate(tasks(name))]


def hidden(model: Decoder, prompt: str, reply: str) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Hidden states and tokens of a row with its end token, from the definition; and how many are the prompt's."""
    begin, said = TOKENIZER.encode(f"{prompt}\n"), [*TOKENIZER.encode(reply), TOKENIZER.eos_token_id]
    tokens = torch.tensor([*begin, *said])

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("ihe,jhe->hij", q, k) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
        return torch.einsum("hij,jhe->ihe", scores.softmax(-1), v)

    return model(tokens, torch.arange(len(tokens)), attend), tokens, len(begin)


def logprobs(model: Decoder, prompt: str, reply: str) -> torch.Tensor:
    """[n] of the reply and the end token."""
    states, tokens, begin = hidden(model, prompt, reply)
    return model.logits(states)[:-1].log_softmax(-1).gather(1, tokens[1:, None])[begin - 1 :, 0]


def expected(name: str, pi: Decoder, ref: Decoder, head: torch.Tensor) -> torch.Tensor:
    """The papers' losses, means over pairs (over tokens: sft; over replies: kto)."""
    if name == "sft":
        return -torch.cat([logprobs(pi, p, w) for p, w, _ in PAIRS]).mean()
    if name == "kto":
        with torch.no_grad():
            after = [*LABELLED[1:], LABELLED[0]]
            mismatched = [(p, c) for (p, _, _), (_, c, _) in zip(LABELLED, after, strict=True)]
            z = sum(logprobs(pi, p, c).sum() - logprobs(ref, p, c).sum() for p, c in mismatched) / len(LABELLED)
            z = z.clamp(min=0)
        losses = []
        for p, c, good in LABELLED:
            h = logprobs(pi, p, c).sum() - logprobs(ref, p, c).sum().detach()
            losses.append(1.5 * (1 - torch.sigmoid(0.3 * (h - z))) if good else 0.5 * (1 - torch.sigmoid(0.3 * (z - h))))
        return torch.stack(losses).mean()
    if name == "reward_model":
        scores = [tuple(hidden(pi, p, reply)[0][-1] @ head[0] for reply in (w, r)) for p, w, r in PAIRS]
        return torch.stack([-logsigmoid(a - b - 0.3) + 0.05 * (a + b) ** 2 for a, b in scores]).mean()
    losses = []
    for p, w, r in PAIRS:
        (a, b), (c, d) = ((logprobs(model, p, w), logprobs(model, p, r)) for model in (pi, ref))
        c, d = c.detach(), d.detach()
        if name == "dpo":
            losses.append(-logsigmoid(0.3 * ((a.sum() - c.sum()) - (b.sum() - d.sum()))))
        elif name == "ipo":
            losses.append(((a - c).mean() - (b - d).mean() - 1 / (2 * 0.3)) ** 2)
        elif name == "orpo":
            odds = [x.mean() - torch.log1p(-x.mean().exp()) for x in (a, b)]
            losses.append(-a.mean() - 0.4 * logsigmoid(odds[0] - odds[1]))
        else:
            losses.append(-logsigmoid(0.3 * (a.mean() - b.mean()) - 0.2 * 0.3))
    return torch.stack(losses).mean()


CONSTANTS: dict[str, dict[str, float]] = {
    "sft": {},
    "reward_model": {"margin": 0.3, "centre": 0.05},
    "dpo": {"beta": 0.3},
    "ipo": {"beta": 0.3},
    "orpo": {"weight": 0.4},
    "simpo": {"beta": 0.3, "gamma_ratio": 0.2},
    "kto": {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.5},
}


@pytest.mark.parametrize("budget", [4096, 12])
@pytest.mark.parametrize("name", PRESETS_OF_GIVEN)
async def test_value_and_gradient_are_the_papers(name: str, budget: int) -> None:
    settings = AlgorithmSettings.preset(name, **CONSTANTS[name])
    algorithm, pi, ref = ConfiguredAlgorithm(settings, 8), decoder(0), decoder(1)
    reference = Reference(ref) if settings.reference is not None else None
    own, scored = TrainerSettings(micro_batch_tokens=budget), ValueModel(pi, shared=True)
    torch.nn.init.normal_(scored.head.weight, generator=torch.Generator().manual_seed(2))
    critic = Critic(scored, own, 4) if settings.scores else None
    trainer = NativeTrainer(pi, own, steps=4, reference=reference, critic=critic, scores=settings.scores)
    seen: dict[str, torch.Tensor] = {}

    async def before_update(update: Any, result: Any) -> None:
        for key, parameter in parameters.items():
            assert parameter.grad is not None
            seen[key] = update.scale * parameter.grad.clone()

    loss = expected(name, pi, ref, scored.head.weight)
    parameters = dict(pi.named_parameters()) | (dict(scored.head.named_parameters()) if settings.scores else {})
    wanted = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
    made = await groups(name, settings)
    prepared, result, _ = await train_on(trainer, algorithm, made, [], 0, before_update)
    for key, value in wanted.items():
        torch.testing.assert_close(seen[key], value, rtol=1e-4, atol=2e-6)
    assert max(float(value.abs().max()) for value in wanted.values()) > 1e-2, "a gradient of nothing proves nothing"
    told = result.metrics["loss"] / result.metrics["tokens"] if name == "sft" else prepared.metrics["preference_loss"]
    assert told == pytest.approx(loss.item(), rel=1e-5)
    if name == "kto":
        assert prepared.metrics["kto_baseline"] > 0 and len(prepared.samples) == len(LABELLED), (
            "mismatched rows train nothing"
        )


async def test_the_baseline_of_kto_is_of_mismatched_rows_and_is_never_below_zero() -> None:
    settings = AlgorithmSettings.preset("kto")
    algorithm, made = ConfiguredAlgorithm(settings, 8), await groups("kto", settings)
    rows = algorithm.rows(made, 0)
    assert len(rows) == 2 * len(LABELLED)
    said = [TOKENIZER.decode(row.tokens.tolist()) for row in rows[len(LABELLED) :]]
    assert said == ["ab=\ndcd<eos>", "cd=e\nef<eos>", "ef=\nb<eos>", "g=\na<eos>"]
    for row in rows:
        assert not row.mask.any() and TOKENIZER.decode(row.tokens[row.weights != 0].tolist()).endswith("<eos>")
    for shift, z in ((1.0, 3.0), (-1.0, 0.0)):  # 4 + 3 + 2 + 2 reply tokens, end tokens included: 11 / 4 of them on average
        beside = [shift * (row.weights != 0) for row in rows[len(LABELLED) :]]
        policy = [np.zeros(len(row.tokens)) for row in rows[: len(LABELLED)]] + beside
        reference = [np.zeros(len(row.tokens)) for row in rows]
        found = algorithm.prepare(made, 0, rows, {"policy": policy, "reference": reference})
        assert found.metrics["kto_baseline"] == pytest.approx(11 / 4 if z else 0.0)
        assert [(s.advantages[-1] > 0) for s in found.samples] == [good for *_, good in LABELLED]


async def test_sft_is_the_cross_entropy_of_transformers(tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    from tidemill.models.hf_weights import save_folder

    pi = decoder(0)
    save_folder(pi, tmp_path / "m", tokenizer_from=None, dtype=torch.float32)
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    settings = AlgorithmSettings.preset("sft")
    made = await groups("sft", settings)
    rows = ConfiguredAlgorithm(settings, 8).rows(made, 0)
    width = max(len(row.tokens) for row in rows)
    padded = torch.tensor([[*row.tokens.tolist(), *[0] * (width - len(row.tokens))] for row in rows])
    labels = torch.full_like(padded, -100)
    for i, row in enumerate(rows):
        learnt = torch.tensor(row.weights != 0).nonzero()[:, 0]
        labels[i, learnt] = padded[i, learnt]
    there = torch.tensor([[j < len(row.tokens) for j in range(width)] for row in rows])
    theirs = other(input_ids=padded, attention_mask=there.long(), labels=labels).loss
    trainer = NativeTrainer(pi, TrainerSettings(), steps=1)
    _, result, _ = await train_on(trainer, ConfiguredAlgorithm(settings, 8), made, [], 0)
    assert result.metrics["loss"] / result.metrics["tokens"] == pytest.approx(theirs.item(), rel=1e-5)


async def test_what_is_told_of_given_replies_is_what_can_be_said_of_them() -> None:
    settings = AlgorithmSettings.preset("simpo")
    algorithm, made = ConfiguredAlgorithm(settings, 8), await groups("simpo", settings)
    rows = algorithm.rows(made, 0)
    zero = [np.zeros(len(row.tokens)) for row in rows]
    better = [v - (i % 2) * (row.weights != 0) for i, (v, row) in enumerate(zip(zero, rows, strict=True))]
    metrics = algorithm.prepare(made, 0, rows, {"policy": better}).metrics
    assert metrics["preference_accuracy"] == 1 and metrics["pairs"] == 3 and metrics["completion_tokens"] > 2
    assert not {"reward", "truncated", "unscored", "zero_variance_groups"} & metrics.keys()
    assert algorithm.drop_reason(made[0]) is None
    worse = [v - ((i + 1) % 2) * (row.weights != 0) for i, (v, row) in enumerate(zip(zero, rows, strict=True))]
    assert algorithm.prepare(made, 0, rows, {"policy": worse}).metrics["preference_accuracy"] == 0
    lost = replace(made[0], trajectories=[replace(t, given=np.zeros_like(t.mask)) for t in made[0].trajectories])
    assert algorithm.drop_reason(lost) == "unscored"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"name": "sft", "corrections": ["age"]}, "corrections does not apply to given = 'answers'"),
        ({"name": "dpo", "overlong": "mask"}, "overlong does not apply to given = 'pairs'"),
        ({"name": "dpo", "zero_variance": "drop"}, "zero_variance does not apply to given = 'pairs'"),
        ({"name": "kto", "advantage": "grpo"}, "advantage does not apply to given = 'labels'"),
        ({"name": "sft", "advantage": "remax"}, "advantage does not apply to given = 'answers'"),
        ({"name": "dpo", "updates": {"minibatches": 2}}, "updates does not apply to given = 'pairs'"),
        ({"name": "sft", "reference": {"kl": 0.1}}, "reference.kl does not apply to given = 'answers'"),
        ({"name": "dpo", "reference": {"distil": 0.1, "every": 1}}, "reference.distil does not apply to given = 'pairs'"),
        ({"name": "sft", "reference": "initial"}, "nothing reads it"),
        ({"name": "sft", "loss": "ppo_clip"}, "the loss 'ppo_clip' does not go with given = 'answers'"),
        ({"name": "sft", "preference": "dpo"}, "preference = 'dpo' does not go with given = 'answers': expected none"),
        ({"name": "dpo", "preference": "kto"}, "preference = 'kto' does not go with given = 'pairs': expected dpo or ipo"),
        ({"name": "kto", "given": "pairs"}, "preference = 'kto' does not go with given = 'pairs'"),
        ({"name": "kto", "given": ""}, "set given = 'labels' too"),
        ({"name": "grpo", "loss": "cross_entropy"}, "set given = 'answers' too"),
        ({"name": "sft", "reduction": "fixed"}, "needs fixed_length"),
        ({"name": "orpo", "beta": 0.1}, "beta does not apply"),
        ({"name": "kto", "z": 0.1}, "z does not apply"),
        ({"name": "dpo", "given": "pair"}, "given = 'pair'"),
    ],
)
def test_what_only_sampled_replies_have_is_refused_by_name(value: dict[str, Any], message: str) -> None:
    from tidemill.core.config import Config, build
    from tidemill.core.errors import ConfigError

    class Recipe(Config):
        algorithm: AlgorithmSettings

    with pytest.raises(ConfigError, match=message):
        build(Recipe, {"algorithm": value})


def test_kto_needs_another_reply_to_measure_by() -> None:
    with pytest.raises(ValueError, match="at least 2 groups"):
        AlgorithmSettings.preset("kto").check(1, 1)
    AlgorithmSettings.preset("kto").check(2, 1)
    AlgorithmSettings.preset("sft").check(1, 1)
    AlgorithmSettings.preset("sft", loss="mine.py:focal")
