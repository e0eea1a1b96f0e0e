import subprocess
import sys

import pytest

from tidemill.algorithms import losses
from tidemill.algorithms.algorithm_settings import AlgorithmSettings, CriticSettings, ReferenceSettings, begins_as
from tidemill.algorithms.losses import LOSSES, loss_by_name
from tidemill.algorithms.prepare_step import ConfiguredAlgorithm
from tidemill.algorithms.presets import ANCHORED, LOSS_CONSTANTS, PER_SEQUENCE, PRESETS
from tidemill.algorithms.validation import OF_REFERENCE
from tidemill.core.config import Config, build, dump
from tidemill.core.errors import ConfigError
from tidemill.core.import_object import constants_of

REFERENCE = {"opd": {"reference": "teacher/"}}  # what a preset leaves to the user


class Recipe(Config):
    algorithm: AlgorithmSettings = AlgorithmSettings.preset("grpo")


def parse(value):
    return build(Recipe, {"algorithm": value}).algorithm


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_resolves_to_functions_that_exist_and_survives_the_round_trip(name):
    given = {"name": name, **REFERENCE.get(name, {})}
    settings = parse(given)
    loss_by_name(settings.loss_spec())
    ConfiguredAlgorithm(settings, 64)
    assert settings == AlgorithmSettings.preset(**given) == parse(dump(settings))
    settings.check(4, 8)


def test_the_settings_know_the_losses():
    """Without torch they are a table: here it is held against the functions."""
    assert set(LOSS_CONSTANTS) == losses.PROPORTIONAL
    assert {name: constants_of(LOSSES[name]) for name in LOSS_CONSTANTS} == LOSS_CONSTANTS
    assert set(LOSS_CONSTANTS) > PER_SEQUENCE and set(LOSS_CONSTANTS) > ANCHORED


def test_presets_are_values_and_overrides_win():
    assert parse("dapo").constants["clip_high"] == 0.28 and parse("dapo").zero_variance == "drop"
    assert parse({"name": "dapo", "clip_high": 0.3}).constants["clip_high"] == 0.3
    assert parse({"name": "dapo", "constants": {"clip_high": 0.3}}) == parse({"name": "dapo", "clip_high": 0.3})
    assert parse({"name": "dapo", "clip_high": None}) == parse("dapo")  # none: the preset's value
    assert parse("grpo").loss_spec().params == {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 0.0}
    assert parse("aipo").loss_spec().params == {"cap": 5.0}
    assert parse({"name": "grpo", "eps": 1e-4}).constants_for("advantage") == {"eps": 1e-4}
    assert parse({"name": "gdpo", "weights": {"format": 0.5}}).constants_for("advantage")["weights"] == {"format": 0.5}


def test_corrections_are_names_or_tables():
    one = parse({"name": "decoupled_ppo", "corrections": "tis"})
    assert one.corrections == parse({"name": "decoupled_ppo", "corrections": [{"name": "tis"}]}).corrections
    two = parse({"name": "decoupled_ppo", "corrections": ["mis_geometric", {"name": "tis", "cap": 8}]})
    assert [(c.name, c.constants) for c in two.corrections] == [("mis_geometric", {}), ("tis", {"cap": 8})]


def test_an_exchanged_loss_takes_its_constants_with_it():
    settings = parse({"name": "dapo", "loss": "aipo"})
    assert "clip_high" not in settings.constants and settings.loss_spec().params == {"cap": 5.0}
    assert settings.zero_variance == "drop"
    assert parse({"name": "dapo", "advantage": "rloo"}).loss_spec() == parse("dapo").loss_spec()


def test_a_users_functions_get_what_was_given():
    assert parse({"name": "grpo", "loss": "mine.py:f"}).loss_spec().params == {}
    assert parse({"name": "grpo", "loss": "mine.py:f", "strength": 2}).loss_spec().params == {"strength": 2.0}
    mine = parse({"name": "grpo", "advantage": "mine.py:f", "strength": 2})
    assert mine.constants_for("advantage") == {"strength": 2.0} and "strength" not in mine.loss_spec().params


def test_a_loss_and_an_advantage_of_one_name_take_their_own_constants():
    settings = parse({"name": "reinforce_pp", "advantage": "reinforce", "loss": "reinforce", "baseline": 0.5})
    assert settings.constants_for("advantage") == {"baseline": 0.5} and settings.loss_spec().params == {}
    ConfiguredAlgorithm(settings, max_tokens=9)


def test_the_loss_gets_what_is_added_to_it():
    spec = parse({"name": "grpo", "reference": {"kl": 0.1, "estimator": "k2"}, "entropy": 0.01}).loss_spec()
    assert [(e.name, e.params, e.weight) for e in spec.also] == [("kl_k2", {"importance": 1.0}, 0.1), ("entropy", {}, 0.01)]
    loss_by_name(spec)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("grop", "unknown algorithm 'grop'; did you mean 'grpo'"),
        ("best", "expected one of grpo, dr_grpo"),
        ("ppo3000", "did you mean 'ppo'"),
        ({"clip_high": 0.3}, "name the preset to start from"),
        ({"name": "aipo", "clip_high": 0.3}, "clip_high does not apply: the loss 'aipo' takes cap; the advantage 'dr_grpo'"),
        ({"name": "grpo", "cap": 3}, "cap does not apply: the loss 'ppo_clip' takes clip_low"),
        ({"name": "grpo", "loss": "ppo"}, "did you mean 'topr'|expected reinforce, ppo_clip"),
        ({"name": "grpo", "advantage": "rlo"}, "did you mean 'rloo'"),
        ({"name": "grpo", "corrections": ["tiss"], "old_logprobs": "recompute"}, "did you mean 'tis'"),
        ({"name": "grpo", "corrections": [{"name": "tis", "cup": 2}]}, "cup does not apply: the correction 'tis' takes cap"),
        ({"name": "grpo", "corrections": ["tis"]}, "old_logprobs = 'recompute'"),
        ({"name": "gspo", "corrections": ["tis"], "old_logprobs": "recompute"}, "one term for a whole attempt: use age"),
        ({"name": "gspo", "advantage": "process"}, "one term for a whole attempt"),
        ({"name": "aipo", "old_logprobs": "recompute"}, "compares with mu only"),
        ({"name": "grpo", "fixed_length": 128}, "does not apply to the reduction 'sequence'"),
        ({"name": "grpo", "overlong": {"cache": 128}}, "does not apply to treat = 'keep'"),
        ({"name": "grpo", "clip_hi": 0.3}, "did you mean 'clip_high'"),
        ({"name": "grpo", "zero_varianc": "drop"}, "did you mean 'algorithm.zero_variance'"),
        ({"name": "grpo", "kl": 0.1}, "did you mean 'reference.kl'"),
        ({"name": "grpo", "reference": {"estimator": "k1"}}, "do not apply while kl = 0"),
        ({"name": "grpo", "reference": "initial"}, "nothing reads it"),
        ({"name": "grpo", "reference": {"kl": 1, "into": "reward", "estimator": "k3"}}, "does not go with into"),
        ({"name": "grpo", "reference": {"kl": 1, "decay": 0.5}}, "never moves"),
        ({"name": "gspo", "reference": {"distil": 1, "every": 1}}, "one term for a whole attempt"),
        ("opd", "teaches nothing: set model"),
        ({"name": "online_dpo", "old_logprobs": "behaviour"}, "needs old_logprobs = 'recompute'"),
        ({"name": "online_dpo", "loss": "ppo_clip"}, "the loss 'reinforce'"),
        ({"name": "reinforce_pp", "zero_variance": "drop"}, "has a gradient all the same"),
        ({"name": "grpo", "advantage": "gae"}, "needs a critic: set critic = 'initial'"),
        ({"name": "grpo", "critic": "initial"}, "nothing reads it: set advantage = 'gae', not 'grpo'"),
        ({"name": "ppo", "advantage": "rloo"}, "nothing reads it"),
        ({"name": "ppo", "zero_variance": "drop"}, "has a gradient all the same"),
        ({"name": "ppo", "loss": "gspo"}, "one term for a whole attempt"),
        ({"name": "ppo", "critic": {"clip": -1}}, "critic.clip"),
        ({"name": "grpo", "updates": {"epochs": 2}}, "2 updates a step need old_logprobs"),
        ({"name": "online_dpo", "updates": {"epochs": 2}}, "exact for one update"),
        ({"name": "decoupled_ppo", "corrections": "opsm", "updates": {"epochs": 2}}, "before it moves: no 2 updates"),
        (7, "algorithm"),
    ],
)
def test_what_cannot_be_meant_is_refused(value, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        parse(value)


def test_a_critic_is_a_word_or_a_table_and_its_loss_a_term():
    assert parse({"name": "ppo", "critic": "policy"}).critic.model == "policy"
    settings = parse({"name": "ppo", "critic": {"clip": 0.2, "weight": 0.1, "lr": 1e-5}, "lam": 0.95})
    assert settings.critic.model == "initial" and settings.constants_for("advantage")["lam"] == 0.95
    assert [(e.name, e.params, e.weight) for e in settings.loss_spec().also] == [("value", {"clip": 0.2}, 0.1)]
    assert parse({"name": "grpo", "advantage": "gae", "critic": "initial"}).critic is not None
    parse("ppo").check(4, 1)


def test_keys_of_the_reference_are_known_as_such():
    assert set(OF_REFERENCE) == set(ReferenceSettings.model_fields)


def test_groups_that_would_train_nothing_are_refused():
    with pytest.raises(ValueError, match="group size 1"):
        parse("grpo").check(4, 1)
    with pytest.raises(ValueError, match="group size 1 with preference 'dpo'"):
        parse("online_dpo").check(4, 1)
    with pytest.raises(ValueError, match=r"k = 8 with groups of 8: give rollout.group_size >= 9"):
        parse({"name": "pass_at_k", "k": 8}).check(4, 8)
    with pytest.raises(ValueError, match="minibatches = 8 of 4 groups"):
        parse({"name": "grpo", "updates": {"minibatches": 8}, "old_logprobs": "recompute"}).check(4, 8)
    parse("grpo").check(4, 2)
    parse("reinforce_pp").check(4, 1)


def test_what_follows_from_the_longest_completion_is_filled_in_once():
    assert parse("dr_grpo").with_longest(64).fixed_length == 64
    assert parse({"name": "dr_grpo", "fixed_length": 32}).with_longest(64).fixed_length == 32
    assert parse("grpo").with_longest(64).fixed_length is None
    assert parse({"name": "grpo", "overlong": "penalty"}).with_longest(64).overlong.cache == 12


def test_the_settings_load_no_torch():
    code = (
        "import sys, tidemill.algorithms.algorithm_settings, tidemill.algorithms.prepare_step;"
        "import tidemill.observability.diagnosis.mismatch;"
        "print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("companion", "expected"),
    [
        (None, None),
        (ReferenceSettings(), "the policy's"),
        (CriticSettings(), "the policy's"),
        (CriticSettings(model="policy"), None),  # a head on its own decoder
        (ReferenceSettings(model="policy"), "named policy"),  # a folder like any other
        (CriticSettings(model="judge"), "named judge"),
    ],
)
def test_what_a_companion_begins_as(companion: ReferenceSettings | CriticSettings | None, expected: str | None):
    assert begins_as(companion, "the policy's", "named {}".format) == expected
