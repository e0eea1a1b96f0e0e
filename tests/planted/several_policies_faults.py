"""Faults of a run with several policies: pool, episodes, recipe, resume and commands. See `faults`."""

# ruff: noqa: E501
from __future__ import annotations

from faults import Fault

SEVERAL_POLICIES_FAULTS = [
    Fault(
        "the first policy's publication waits for an engine that needs the second one's",
        "        if self._updates.of_one_step:\n            await",
        "        if True:\n            await",
        "controller/test_pool_of_policies.py",
    ),
    Fault(
        "an engine joins with one policy",
        "for told in self._updates.lacking(brought):",
        "for told in self._updates.lacking(brought)[:1]:",
        "controller/test_pool_of_policies.py",
    ),
    Fault(
        "an engine that joins is brought a policy twice",
        "                brought[told.version.policy] = told.version\n",
        "",
        "controller/test_pool_of_policies.py",
    ),
    Fault(
        "a policy steps back if another one did not",
        "before = self._latest.get(policy := update.version.policy)",
        "before, policy = next(iter(self._latest.values()), None), update.version.policy",
        "controller/test_updates_in_force.py controller/test_pool_of_policies.py",
    ),
    Fault(
        "one policy that is published again brings all of them back",
        "        self._gone.discard(policy)",
        "        self._gone.clear()",
        "controller/test_updates_in_force.py",
    ),
    Fault(
        "the policy that plays is not the environment's",
        'how["policy"] = self.policies.get(task.env, self.policies.get("", "policy"))',
        'how["policy"] = next(iter(self.policies.values()), "policy")',
        "envs/test_frozen_policies.py",
    ),
    Fault(
        "another version may answer for a frozen policy",
        "lambda reply: self._frozen.check(policy, reply)",
        "lambda reply: None",
        "envs/test_frozen_policies.py",
    ),
    Fault(
        "another policy may answer for the one that plays",
        "if source.policy != self._policy]:",
        "if False]:",
        "envs/test_frozen_policies.py",
    ),
    Fault(
        "a frozen policy is asked with the seed of the next reply",
        'derive_seed(self._seeds(self.turns), "ask", self._asked)',
        "self._seeds(self.turns)",
        "envs/test_frozen_policies.py",
    ),
    Fault(
        "a worker's question to a frozen policy goes to the one that plays",
        "            if ask.policy:\n",
        "            if False:\n",
        "envs/test_frozen_policies.py",
    ),
    Fault(
        "a reward that asks is refused before a run",
        '        if request.policy != "policy":\n',
        "        if False:\n",
        "envs/test_frozen_policies.py",
    ),
    Fault(
        "a warm-up has the policies of its run",
        '        "policies": {},\n        "placement"',
        '        "placement"',
        "run/test_policies_recipe.py",
    ),
    Fault(
        "all policies have the trainer's learning rate",
        "lr = config.policies[name].lr or config.trainer.lr",
        "lr = config.trainer.lr",
        "run/test_policies_recipe.py",
    ),
    Fault(
        "engines take turns though they serve several policies",
        'may_turn = placement.share == "auto" and not config.policies',
        'may_turn = placement.share == "auto"',
        "run/test_policies_recipe.py",
    ),
    Fault(
        "a frozen policy may change between two starts",
        "if (before := known.get(name, version)) != version:",
        "if (before := known.get(name, version)) is None:",
        "run/test_policies_runs.py::test_a_frozen_policy_stays_what_it_was",
    ),
    Fault(
        "what a frozen policy sampled may be trained on after a resume",
        "for version in ledger.versions() if version.policy in policies}",
        "for version in ledger.versions()}",
        "ledger/test_ledger_policies.py",
    ),
    Fault(
        "a trainer's memory counts one adapter",
        "tuple(size for own in each for size in tensor_sizes(arch, own.config))",
        "tensor_sizes(arch, next(iter(each)).config)",
        "run/planner/test_policies_memory.py",
    ),
    Fault(
        "an engine of several policies is said to hold a spare",
        "updated and not turns and not beside",
        "updated and not turns",
        "run/planner/test_policies_memory.py",
    ),
    Fault(
        "the audit of a run reads the first policy's weights for all",
        'yield folder / "trainer" / policy, read_manifest(folder).step',
        'yield folder / "trainer" / (policy and min(p.name for p in (folder / "trainer").iterdir())), read_manifest(folder).step',
        "run/test_policies_runs.py::test_a_run_goes_on_with_all_its_policies_and_commands_read_each",
    ),
    Fault(
        "a trainer's memory counts one whole model",
        "return 1 if config.adapters else len(config.trained_policies)",
        "return 1",
        "run/planner/test_whole_policies_memory.py",
    ),
    Fault(
        "a version goes to the first pool",
        "return await self.of(published.version.policy).publish(published, trainer)",
        "return await self._pools[0].publish(published, trainer)",
        "controller/test_policy_pools.py",
    ),
    Fault(
        "a recorded version may have been changed",
        "if not any(each.fingerprint == fingerprint for each in known):",
        "if not known:",
        "run/test_frozen_folders.py",
    ),
    Fault(
        "a frozen model proves nothing",
        "    if not spec.proves:",
        "    if True:",
        "engine/native/test_side_builder.py",
    ),
]
