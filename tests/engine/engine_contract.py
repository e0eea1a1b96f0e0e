"""Contract of every engine: a subclass of `EngineContract` with a `make` runs these tests on an engine of its own.

    class TestMyEngine(EngineContract):
        def make(self, folder: Path) -> Engine:
            return MyEngine(folder, ...)

`make` is called inside the event loop, once a test. It returns an engine that serves the Hugging Face model in `folder`
(float32, a Llama of 61 tokens with a context of 96, no tokenizer) as `Version(0)` of the policy "policy", ends completions
at `contract_base.EOS` unless told to ignore it, and receives weights by the `shared_memory` transport. Nothing else is
asked: new versions are published by a real trainer (`new_version`), and `transformers` says what the logprobs are.

An engine declares its `Capabilities`. A test that needs one which is not declared checks that the engine refuses such a
request in one sentence, and is then skipped by the capability's name.
"""

from __future__ import annotations

from contract_capabilities import CapabilityContract
from contract_lifecycle import LifecycleContract
from contract_sampling import SamplingContract


class EngineContract(SamplingContract, CapabilityContract, LifecycleContract):
    """Everything that an engine must keep."""
