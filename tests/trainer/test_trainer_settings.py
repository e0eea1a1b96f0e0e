import subprocess
import sys

import pytest

from tidemill.core.config import build, load
from tidemill.core.errors import ConfigError
from tidemill.trainer.trainer_kinds import DeepSpeedSettings, TrainerSettings


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"lr": 0}, "lr = 0"),
        ({"betas": [0.9, 1.0]}, "betas.1 = 1.0: should be less than 1"),
        ({"schedule": "step"}, "schedule = 'step'"),
        ({"min_lr_ratio": 0.1}, "does not apply to schedule 'constant'"),
        ({"microbatch_tokens": 5}, "did you mean 'micro_batch_tokens'"),
        ({"dtype": "float16"}, "dtype = 'float16'"),
    ],
)
def test_what_cannot_be_meant_is_refused(tree, message):
    with pytest.raises(ConfigError, match=message):
        build(TrainerSettings, tree)


def test_none_is_a_kind_of_sharding_on_a_command_line_too():
    for given in ("shard=none", "shard='none'"):
        assert load(TrainerSettings, [], [given]).shard == "none"


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"shard": "zero3"}, "shard: DeepSpeed's 'zero3' gathers a weight for its module's own call only"),
        ({"shard": "hsdp"}, "shard = 'hsdp': should be 'zero1' or 'zero2'"),
        ({"replicas": 2}, "unknown key 'replicas'"),
        ({"moments": "int8"}, "moments = 'int8': DeepSpeed holds moments and adds up gradients in float32 on the device"),
        ({"moments_on": "host"}, "moments_on = 'host': DeepSpeed holds"),
        ({"reduce": "int8"}, "reduce = 'int8': DeepSpeed holds"),
        ({"min_lr_ratio": 0.1}, "does not apply to schedule 'constant'"),
    ],
)
def test_what_deepspeed_cannot_do_is_refused(tree, message):
    with pytest.raises(ConfigError, match=message):
        build(DeepSpeedSettings, tree)
    assert build(DeepSpeedSettings, {"shard": "zero1", "checkpointing": 0.5}).stage == 1


def test_few_options_and_no_torch():
    assert len(TrainerSettings.model_fields) <= 21
    code = "import sys, tidemill.trainer.trainer_kinds; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "False"
