import subprocess
import sys

import pytest

from tidemill.algorithms.losses import LOSSES, loss_by_name
from tidemill.algorithms.settings import LOSS_CONSTANTS, PRESETS, AlgorithmSettings
from tidemill.config import Config, ConfigError, build, dump


class Recipe(Config):
    algorithm: AlgorithmSettings = AlgorithmSettings.preset("grpo")


def parse(value):
    return build(Recipe, {"algorithm": value}).algorithm


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_resolves_to_a_loss_that_exists_and_survives_the_round_trip(name):
    settings = parse(name)
    loss_by_name(settings.loss_spec())
    assert settings == AlgorithmSettings.preset(name) == parse(dump(settings)) == parse({"name": name})


def test_the_settings_know_the_constants_of_the_losses():
    for name, constants in LOSS_CONSTANTS.items():
        assert LOSSES[name].__kwdefaults__ == constants


def test_presets_are_values_and_overrides_win():
    assert parse("dapo").clip_high == 0.28 and parse("dapo").zero_variance == "drop"
    assert parse({"name": "dapo", "clip_high": 0.3}).clip_high == 0.3
    assert parse({"name": "dapo", "clip_high": None}) == parse("dapo")  # none: the preset's value
    assert parse("grpo").loss_spec().params == {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 0.0, "tis_cap": 0.0}
    assert parse("aipo").loss_spec().params == {"cap": 5.0}


def test_an_exchanged_loss_takes_its_constants_with_it():
    settings = parse({"name": "dapo", "loss": "aipo"})
    assert settings.clip_high is None and settings.loss_spec().params == {"cap": 5.0} and settings.zero_variance == "drop"


def test_a_users_loss_gets_only_what_was_given():
    assert parse({"name": "grpo", "loss": "mine.py:f"}).loss_spec().params == {}
    assert parse({"name": "grpo", "loss": "mine.py:f", "cap": 2}).loss_spec().params == {"cap": 2.0}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("grop", "unknown algorithm 'grop'; did you mean 'grpo'"),
        ("ppo3000", "expected one of grpo, dr_grpo"),
        ({"clip_high": 0.3}, "name the preset to start from"),
        ({"name": "aipo", "clip_high": 0.3}, "clip_high does not apply to the loss 'aipo', which takes cap"),
        ({"name": "grpo", "cap": 3}, "cap does not apply to the loss 'ppo_clip'"),
        ({"name": "grpo", "loss": "ppo"}, "expected ppo_clip, aipo or FILE.py:function"),
        ({"name": "grpo", "dual_clip": 0.5}, "a number > 1"),
        ({"name": "grpo", "tis_cap": 2.0}, "old_logprobs = 'recompute'"),
        ({"name": "aipo", "old_logprobs": "recompute"}, "compares with the sampler only"),
        ({"name": "grpo", "fixed_length": 128}, "does not apply to the reduction 'sequence'"),
        ({"name": "grpo", "clip_hi": 0.3}, "did you mean 'algorithm.clip_high'"),
        ({"name": "grpo", "clip_high": -1}, "greater than or equal to 0"),
        (7, "algorithm"),
    ],
)
def test_what_cannot_be_meant_is_refused(value, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        parse(value)


def test_a_group_of_one_is_refused():
    with pytest.raises(ValueError, match="group size 1"):
        parse("grpo").check(1)
    parse("grpo").check(2)


def test_fixed_length_is_filled_in_once():
    assert parse("dr_grpo").with_fixed_length(64).fixed_length == 64
    assert parse({"name": "dr_grpo", "fixed_length": 32}).with_fixed_length(64).fixed_length == 32
    assert parse("grpo").with_fixed_length(64).fixed_length is None


def test_the_settings_load_no_torch():
    code = (
        "import sys, tidemill.algorithms.settings, tidemill.algorithms.prepare, tidemill.algorithms.mismatch;"
        "print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "False"
