"""Other people's clients talk to `tidemill serve`: each in an environment of its own, with what was tried and how it ended.

    python benchmarks/clients.py [--only NAME] [--model FOLDER]

Builds the environments in `.peers/clients` (1.5 GB, once), makes a small model with random weights unless one is given,
serves it, and runs `systems/client_NAME.py` for each client. Prints a table and writes `results/clients.json`; status 1 when
anything failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import HERE, PEERS, save, table

CLIENTS = {
    "openai": ("openai==3.57.0",),
    "langchain": ("langchain-openai==1.7.4",),
    "litellm": ("litellm==1.110.2",),
    "lm_eval": ("lm_eval[api]==0.4.13", "transformers==5.23.0"),
    "inspect": ("inspect_ai==0.3.285", "openai==3.57.0"),
}
KEY = "sesame"
INSTALL_S, START_S, TRY_S = 1200.0, 120.0, 600.0
TEXT = (
    "The tide turns the mill, and the mill grinds the grain. What is 12 + 30? It is 42! Spell 'tide' backward: e, d, i, t."
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def environment(name: str) -> Path:
    """The interpreter of a client's environment, which is built where it is not there or of other versions."""
    folder, wanted = PEERS / "clients" / name, "\n".join(CLIENTS[name])
    marker = folder / ".installed"
    if not (marker.is_file() and marker.read_text() == wanted):
        print(f"installing {', '.join(CLIENTS[name])}", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        install = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *CLIENTS[name]]
        subprocess.run(install, check=True, timeout=INSTALL_S)
        marker.write_text(wanted)
    return folder / "bin" / "python"


def make_model(folder: Path) -> Path:
    """Byte-level BPE with a chat template, and random weights."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from tidemill.models.architecture import Architecture
    from tidemill.models.hf_weights import empty_decoder, save_folder

    specials = ["<pad>", "<|im_start|>", "<|im_end|>"]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=specials, initial_alphabet=letters, show_progress=False)
    core.train_from_iterator([TEXT] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=specials[0], eos_token=specials[2], additional_special_tokens=specials[1:2]
    )
    tokenizer.chat_template = CHATML
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"model_type": "llama", "vocab_size": len(tokenizer), "max_position_embeddings": 1024}
    decoder = empty_decoder(Architecture.from_dict(shape | {"eos_token_id": tokenizer.eos_token_id}))
    decoder.initialise(torch.Generator().manual_seed(1), std=0.2)
    with tempfile.TemporaryDirectory() as companions:
        tokenizer.save_pretrained(companions)
        save_folder(decoder, folder, tokenizer_from=companions, dtype=torch.float32)
    return folder


@contextmanager
def served(model: Path) -> Iterator[str]:
    """The address of a server of the model."""
    command = [sys.executable, "-m", "tidemill", "serve", str(model), "--port", "0"]
    environment = os.environ | {"TIDEMILL_API_KEY": KEY}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            if not (found := re.search(r"(http://\S+)/v1", said)):
                raise RuntimeError(f"the server did not start: {said!r}")
            yield found[1]
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)


def tried(name: str, url: str, model: Path, served_as: str) -> list[dict[str, Any]]:
    """What a client's script says of each thing that it tried."""
    given = json.dumps({"url": url, "model": served_as, "folder": str(model), "key": KEY})
    python, script = environment(name), HERE / "systems" / f"client_{name}.py"
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryFile("w+") as said,
        tempfile.TemporaryFile("w+") as failed,
    ):
        try:
            status: int | str = subprocess.run(
                [str(python), str(script), given],
                stdout=said,
                stderr=failed,
                timeout=TRY_S,
                cwd=folder,
                env=os.environ | offline,
            ).returncode
        except subprocess.TimeoutExpired:
            status = f"not done within {TRY_S:g} s"
        said.seek(0), failed.seek(0)
        found = [json.loads(line[6:]) for line in said if line.startswith("trial ")]
        if status or not found:
            found.append({"tried": "the whole script", "ok": False, "said": f"{failed.read()[-1500:]}\n{status}"})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CLIENTS)
    parser.add_argument("--model", type=Path)
    given = parser.parse_args()
    names = [given.only] if given.only else list(CLIENTS)
    for name in names:
        environment(name)
    results: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or make_model(Path(folder) / "small")
        with served(model) as url:
            for name in names:
                results[name] = tried(name, url, model, model.name)
    rows = [
        {
            "client": CLIENTS[name][0],
            "tried": trial["tried"],
            "result": "ok" if trial["ok"] else "FAILED: " + trial["said"].splitlines()[-1][:200],
        }
        for name, trials in results.items()
        for trial in trials
    ]
    print(table(rows))
    save("clients", results, {name: list(CLIENTS[name]) for name in names})
    return int(any(not trial["ok"] for trials in results.values() for trial in trials))


if __name__ == "__main__":
    sys.exit(main())
