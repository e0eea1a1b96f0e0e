"""An engine of a user's own file: the one over `transformers`, which also returns an entropy and can do less.

The tests register it as an engine kind. It does not tell which version sampled a token, keeps no support, and proves only
what it received.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch

from tidemill.core.interfaces import Capabilities
from tidemill.core.token_extras import TokenExtra
from tidemill.core.types import Completion, GenerateRequest
from tidemill.engine.engine_kinds import EngineSpec
from tidemill.engine.request_refusals import refuse_asked
from tidemill.engine.transformers.causal_model import CausalModel
from tidemill.engine.transformers.sampled_row import SampledRow
from tidemill.engine.transformers.transformers_engine import TransformersEngine
from tidemill.engine.transformers.transformers_settings import TransformersSettings

ENTROPY = TokenExtra("entropy", "float32", fill=-1)  # of the distribution that a token was sampled from, in nats


class EntropySettings(TransformersSettings):
    kind: Literal["entropy"] = "entropy"


def build(spec: EngineSpec, *parts: Any) -> EntropyEngine:
    assert isinstance(spec.engine, EntropySettings)
    model = CausalModel(spec.model, torch.float32, torch.device("cpu"))
    return EntropyEngine(model, spec.engine, receiver=parts[0], version=spec.version, name=spec.name)


class EntropyEngine(TransformersEngine):
    extras = (ENTROPY,)

    async def capabilities(self) -> Capabilities:
        return replace(await super().capabilities(), token_versions=False, support=False, proof="received")

    async def generate(self, request: GenerateRequest) -> Completion:
        p, oldest = request.params, self._version
        truncated = {"top_p": p.top_p < 1, "top_k": p.top_k > 0, "min_p": p.min_p > 0}
        refuse_asked(self.name, truncated | {"top_logprobs": p.top_logprobs > 0})
        done = await super().generate(request)
        return replace(done, versions=done.versions * 0 + oldest.step, sources=(oldest,))

    def _sampled(self, row: SampledRow, logits: torch.Tensor) -> None:
        super()._sampled(row, logits)
        if temperature := row.request.params.temperature:
            logprobs = torch.log_softmax(logits.double() / temperature, -1)
            row.extras.append({"entropy": float(-(logprobs.exp() * logprobs).sum())})
        else:  # a greedy choice is certain
            row.extras.append({"entropy": 0.0})
