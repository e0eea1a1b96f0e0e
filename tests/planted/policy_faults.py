"""Faults of the trainer and the algorithms of several policies: see `faults`."""

from __future__ import annotations

from faults import Fault

_TRAINERS, _STEPS = "trainer/test_policy_trainers.py", "trainer/test_policy_steps.py"
_ALGORITHMS = "algorithms/test_policy_algorithms.py"

POLICY_FAULTS = [
    Fault(
        "each policy has the frozen weights once more",
        "    return deepcopy(base, {id(each): each for each in shared})\n",
        "    return deepcopy(base)\n",
        _TRAINERS,
    ),
    Fault(
        "each policy has the quantised matrices once more",
        "shared = [base.arch, *base.parameters(), *bases(base), ",
        "shared = [base.arch, *base.parameters(), ",
        _TRAINERS,
    ),
    Fault(
        "every row goes to the first policy",
        "[i for i, sample in enumerate(samples) if sample.policy == name]",
        "[i for i, _ in enumerate(samples) if name == self._first]",
        _TRAINERS,
    ),
    Fault(
        "a policy without a gradient takes a step",
        "for name, each in self.trainers.items() if name in self._moved}",
        "for name, each in self.trainers.items()}",
        _TRAINERS,
    ),
    Fault(
        "a policy takes a step before another's gradient is known",
        "                await each.check(scale)\n",
        "                pass\n",
        _TRAINERS,
    ),
    Fault(
        "a step's metrics are those of the last policy",
        "max(value, greatest.get(key, value))",
        "value",
        _TRAINERS,
    ),
    Fault(
        "a checkpoint changes one policy before another's is read",
        '        found = [(each, await each.checked(f"{folder}/{name}")) for name, each in self.trainers.items()]\n',
        "        found = []\n        for name, each in self.trainers.items():\n"
        '            await each.load(f"{folder}/{name}")\n',
        _TRAINERS,
    ),
    Fault(
        "a gradient outlives what is loaded over it",
        "            await each.restore(restore)\n        self._moved.clear()\n",
        "            await each.restore(restore)\n",
        _TRAINERS,
    ),
    Fault(
        "all policies are trained at one rate",
        'settings.model_copy(update={"lr": each.lr}), senders[name]',
        "settings, senders[name]",
        _STEPS,
    ),
    Fault(
        "all policies have one schedule",
        '{"steps": each.steps, "reference": None if trainers else spec.reference}',
        '{"reference": None if trainers else spec.reference}',
        _STEPS,
    ),
    Fault(
        "a policy begins with a new adapter in place of its own",
        "            start=each.lora and each.lora.start,\n",
        "            start=None,\n",
        _STEPS,
    ),
    Fault(
        "a policy's gradient has the greatest scale of all",
        "        share = 1.0 if update.scale == scale else update.scale / scale\n",
        "        share = 1.0\n",
        f"{_ALGORITHMS} {_STEPS}",
    ),
    Fault(
        "later updates have the weights of the first",
        '    return f"{policy}/{loss}" + (f"/{number}" if number else "")\n',
        '    return f"{policy}/{loss}"\n',
        f"{_ALGORITHMS} {_STEPS}",
    ),
    Fault(
        "an entropy begins anew after a step without its policy",
        "                for earlier in range(step, -1, -1):\n",
        "                for earlier in range(step, step - 1, -1):\n",
        _ALGORITHMS,
    ),
    Fault(
        "a lone environment's own algorithm is a mixture",
        "    if len(algorithms) == 1:  # whatever it is called",
        "    if set(algorithms) == {COMMON}:  # whatever it is called",
        _ALGORITHMS,
    ),
    Fault(
        "the metrics of a policy without a last update are lost",
        "        metrics |= await trainer.apply(update.scale)",
        "        metrics = await trainer.apply(update.scale)",
        _STEPS,
    ),
]
