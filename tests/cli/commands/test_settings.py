"""`tidemill settings`: nothing is left out, and what is said of a key is what its class says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import typer
from pydantic import Field

from tidemill.cli.commands.settings import known
from tidemill.cli.main import app
from tidemill.core.config import dump
from tidemill.engine.engine_kinds import ENGINES, BaseEngineSettings
from tidemill.run.recipe import load_recipe

OPTIONS = (Path(__file__).parents[2] / "options.txt").read_text().split()


def test_every_option_is_there():
    assert {each.key for each in known()} == set(OPTIONS)


def test_what_kinds_of_a_table_know_alike_is_said_once_and_else_of_each():
    said = {(each.key, kind): each.default for each in known() for kind in each.kinds}
    assert said["env.size", "reasoning_gym"] == "10000" and said["env.size", "guess"] == "2000"
    assert said["env.data", "rows"] is None and said["env.data", "python"] == '""'
    (weight,) = [each for each in known() if each.key == "env.weight"]
    assert weight.kinds == ()  # all have it


def test_defaults_are_those_of_a_recipe_that_says_nothing_else():
    config = dump(load_recipe([], ["run_dir=a", "model=new:0.1m", "env=guess"]))

    compared = 0
    for each in known():
        *tables, name = each.key.split(".")
        table = config
        for part in tables:
            table = table[part] or {}  # none: a table that is not in use
        if each.kinds and table.get("kind") not in each.kinds:
            continue
        if each.default is not None and tables[:1] != ["env"] and name in table:
            compared += 1
            assert table[name] == (None if each.default == "none" else json.loads(each.default)), each
    assert compared > 80


FRAGMENTS = re.compile("(Of|For|To|In|From|With|What|That|How|By|Until|Where|When|And|As|On|If) ")


def whole(phrase: str) -> bool:
    """True for a phrase that stands alone: "Norm to which gradients are clipped", not "of the norm"."""
    return " " in phrase and phrase[0].isupper() and not FRAGMENTS.match(phrase) and not phrase.endswith(".")


def test_every_key_is_described_in_a_whole_phrase():
    assert whole("Held-out tasks") and not whole("") and not whole("of tasks") and not whole("Of tasks")
    assert [(each.key, each.what) for each in known() if not whole(each.what)] == []


def test_every_argument_of_a_command_is_described_in_a_whole_phrase():
    def parameters(command: Any, name: str) -> Iterator[tuple[str, str]]:
        for inner in getattr(command, "commands", {}).values():
            yield from parameters(inner, f"{name} {inner.name}")
        yield from ((f"{name} {each.name}", each.help) for each in command.params if each.name != "help")

    found = list(parameters(typer.main.get_command(app), "tidemill"))
    assert len(found) > 50 and [each for each in found if not whole(each[1] or "")] == []


def test_a_kind_of_ones_own_is_described_too():
    class Mine(BaseEngineSettings):
        """An engine that is registered."""

        kind: Literal["mine"] = "mine"
        depth: int = Field(default=3, ge=1, description="Layers that are skipped")

    globals()["Mine"] = Mine
    ENGINES.register("mine", f"{__name__}:Mine", f"{__name__}:known")
    try:
        (depth,) = [each for each in known() if each.key == "engine.depth"]
    finally:
        ENGINES.unregister("mine")
    assert (depth.what, depth.default, depth.kinds) == ("Layers that are skipped", "3", ("mine",))


def test_type_default_and_description_of_a_key():
    said = {each.key: each for each in known()}
    assert said["trainer.max_grad_norm"].what == "Norm to which gradients are clipped. 0: not clipped"
    assert said["env.binary"].what == "Give 1 for the full score and 0 for less: partial scores can be gamed"
    assert said["env.binary"].kinds == ("reasoning_gym",) and said["env.binary"].default == "false"
    assert (
        said["env.kind"].takes == '"reasoning_gym" | "rows" | "guess" | "python" | "agent"' and said["env.kind"].kinds == ()
    )
    assert said["model"].default is None and said["engine.kv_memory_mb"].takes == "a whole number or none"
    assert said["trainer.betas"].default == "[0.9, 0.999]"


def test_one_table_and_a_key_that_is_none(tidemill):
    said = tidemill("settings", "trainer")
    keys = {line.split()[0] for line in said.out.splitlines() if line.startswith("  trainer.")}  # kinds may share a key
    assert said.code == 0 and len(keys) == sum(key.startswith("trainer.") for key in OPTIONS)
    (one,) = json.loads(tidemill("settings", "trainer.lr", "--json").out)
    assert (one["key"], one["default"], one["takes"]) == ("trainer.lr", "1e-06", "a number")
    wrong = tidemill("settings", "train")
    assert wrong.code == 2 and "no setting is called 'train': expected one of algorithm, data," in wrong.out
