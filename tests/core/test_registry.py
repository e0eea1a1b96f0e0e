"""Registries of kinds: what is registered is found, by this process and by others, and what is not is refused by name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from tidemill.core.config import Config, build, dump, load, tables_of
from tidemill.core.errors import ConfigError
from tidemill.core.registry import KindSettings, Registry

PUMPS = Registry("pump.kind")
PUMPS.register("hand", f"{__file__}:Hand", f"{__file__}:build_hand")


class Pump(KindSettings, registry=PUMPS):
    litres: int = 1


class Hand(Pump):
    kind: Literal["hand"] = "hand"


class Motor(Pump):
    kind: Literal["motor"] = "motor"
    watts: int = 100


class Well(Config):
    pump: Pump = Hand()


def build_hand(settings: Hand) -> str:
    return f"by hand, {settings.litres} l"


@pytest.fixture
def motor() -> Iterator[None]:
    PUMPS.register("motor", f"{__file__}:Motor", f"{__file__}:build_hand")
    yield
    PUMPS.unregister("motor")


def test_a_field_takes_the_settings_of_any_registered_kind(motor: None) -> None:
    chosen = load(Well, overrides=["pump.kind=motor", "pump.watts=5", "pump.litres=2"])
    assert chosen.pump == Motor(watts=5, litres=2)
    assert dump(chosen) == {"pump": {"kind": "motor", "litres": 2, "watts": 5}}  # with the fields of its kind
    assert build(Well, dump(chosen)) == chosen
    assert Well(pump=Motor()).pump == Motor()


def test_the_first_kind_is_the_default(motor: None) -> None:
    assert load(Well, overrides=["pump.litres=3"]).pump == Hand(litres=3)
    assert PUMPS.names() == ["hand", "motor"]
    assert tables_of(Well.model_fields["pump"].annotation) == [Hand, Motor]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("pump.kind=wind", "pump.kind = 'wind': should be 'hand' or 'motor'"),
        ("pump.kind=[]", "pump.kind = []: should be 'hand' or 'motor'"),
        ("pump=9", "pump = 9: should be a valid dictionary or instance of Hand"),
        ("pump.watts=3", "unknown key 'pump.watts'"),  # of another kind
        ("pump={kind='motor', watts='many'}", "pump.watts = 'many': should be a valid integer"),
        ("pump={kind='motor', wats=3}", "unknown key 'pump.wats'; did you mean 'pump.watts'?"),
    ],
)
def test_what_does_not_fit_is_one_sentence(motor: None, given: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(Well, overrides=[given])
    assert str(refused.value).startswith(said) and "\n" not in str(refused.value)


def test_an_unknown_name_lists_the_names_known(motor: None) -> None:
    for find in (PUMPS.settings_of, PUMPS.builder_of):
        with pytest.raises(ConfigError) as refused:
            find("wind")
        assert str(refused.value) == "pump.kind 'wind' is not known: expected 'hand' or 'motor'"


def test_a_name_has_one_meaning(motor: None) -> None:
    PUMPS.register("motor", f"{__file__}:Motor", f"{__file__}:build_hand")  # the same again
    with pytest.raises(ValueError, match=r"pump.kind 'motor' is registered already, as .*:build_hand"):
        PUMPS.register("motor", f"{__file__}:Motor", f"{__file__}:another")


def test_another_registry_learns_what_was_registered_here(motor: None) -> None:
    other = Registry("pump.kind")
    other.learn(PUMPS.table())
    assert other.names() == PUMPS.names()
    assert other.builder_of("motor")(Motor(litres=4)) == "by hand, 4 l"


def test_the_tables_of_kinds_import_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom tidemill.run.recipe import RunConfig\nfrom tidemill.run.roles import REGISTRIES\n"
        "for each in REGISTRIES.values(): each.all_settings()\n"
        "assert len(REGISTRIES) == 4 and 'torch' not in sys.modules\n"
        "for each in REGISTRIES.values(): [each.builder_of(name) for name in each.names()]\n"
        "assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True, cwd=tmp_path)
