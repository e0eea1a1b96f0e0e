"""Faults of engines that serve several policies side by side, as in `faults.py`."""

from __future__ import annotations

from faults import Fault

SIDE = "engine/native/test_several_policies.py"
UPDATES = "engine/native/test_side_updates.py"

SIDE_FAULTS = [
    Fault(
        "rows of several policies stay in the order of their policies",
        "        return done.index_select(0, self._back)\n",
        "        return done\n",
        "models/test_grouped_adapters.py",
    ),
    Fault(
        "rows are put back by the order that sorted them",
        'self._order, self._back = tensor(order), tensor(np.argsort(order, kind="stable"))',
        "self._order, self._back = tensor(order), tensor(order)",
        "models/test_grouped_adapters.py",
    ),
    Fault(
        "the end of the last layer takes the first rows' policies",
        "RowGroups(policies[wanted], self.by_policy, tensor)",
        "RowGroups(policies[: len(wanted)], self.by_policy, tensor)",
        "models/test_grouped_adapters.py",
    ),
    Fault(
        "tokens are stamped with the version that was committed last",
        "self._updates.served.epochs[plan.policies[plan.sample_rows]]",
        "np.full(len(plan.sample_rows), len(self._updates.served.every) - 1)",
        SIDE,
    ),
    Fault(
        "new sequences have the salt of the first policy",
        "        sequence.salt = sequence.salt or self.salts[sequence.policy]\n",
        "        sequence.salt = sequence.salt or self.salts[0]\n",
        SIDE,
    ),
    Fault(
        "prompts find the pages of the first policy",
        "            salt = sequence.salt or self.salts[sequence.policy]\n",
        "            salt = sequence.salt or self.salts[0]\n",
        SIDE,
    ),
    Fault(
        "an episode's policies share one salt",
        "        place = salt.policy, key\n",
        '        place = "", key\n',
        SIDE,
    ),
    Fault(
        "compiled decoding leaves the adapters out",
        "return replace(serve(decoder, self.versions[0], pack), decoding=None, adapters=adapters)",
        "return replace(serve(decoder, self.versions[0], pack), adapters=adapters)",
        SIDE,
    ),
    Fault(
        "an update prefills other policies again",
        "reversed([each for each in self.running.values() if each.policy == policy])",
        "reversed([each for each in self.running.values()])",
        UPDATES,
    ),
    Fault(
        "an update restarts other policies' scores",
        "own = [sequence for sequence in scheduler.running.values() if sequence.policy == policy]",
        "own = [*scheduler.running.values()]",
        UPDATES,
    ),
    Fault(
        "an update waits for the sequences of all policies",
        "await self.between_steps(partial(self._swap, staged), {policy})",
        "await self.between_steps(partial(self._swap, staged))",
        UPDATES,
    ),
    Fault(
        "sequences of a policy that drains are admitted",
        "                aside.append(self.waiting.popleft())\n                continue\n",
        "                pass\n",
        "engine/native/test_engine_blocks.py",
    ),
    Fault(
        "sequences that are held back lose their turn",
        "self.waiting.extendleft(reversed(aside))",
        "self.waiting.extend(aside)",
        "engine/native/test_engine_blocks.py",
    ),
    Fault(
        "adapters of other policies are not looked at again",
        "for adapter in filter(None, adapters.by_policy):  #",
        "for adapter in filter(None, [present]):  #",
        UPDATES,
    ),
    Fault(
        "an adapter that is served is not looked at again",
        "        if found != self.fingerprint:\n            raise PolicyMismatch(\n",
        "        if not found:\n            raise PolicyMismatch(\n",
        f"{UPDATES} models/test_grouped_adapters.py",
    ),
    Fault(
        "the adapter of the version before passes for the next one",
        "(present.version, present.fingerprint) != (version, self._staged.fingerprint)",
        "present.version.policy != version.policy",
        UPDATES,
    ),
    Fault(
        "a matrix may leave the adapters out",
        "or serving.decoding is not None or not adapters.added_to(serving.decoder)",
        "or serving.decoding is not None",
        UPDATES,
    ),
    Fault(
        "the base of several policies is not looked at again",
        "            yield from expect_words(serving, self._words, version)\n",
        "",
        UPDATES,
    ),
    Fault(
        "numbers that are not finite are served",
        "        if not bool(torch.isfinite(new).all()):\n",
        "        if not len(new):\n",
        f"{UPDATES} models/test_grouped_adapters.py",
    ),
    Fault(
        "a frozen policy is updated",
        "        if new.policy in self._frozen:\n",
        "        if not new.policy:\n",
        UPDATES,
    ),
    Fault(
        "the prefix cache of policies that were not updated is dropped",
        "return {key for keys in self._recent for key in keys}",
        "return {*self._recent[self.numbers[self.latest.policy]]}",
        UPDATES,
    ),
    Fault(
        "several policies give back weights that cannot come again",
        "        if self.weights.adapters is not None:\n            raise ValueError(\n",
        "        if False:\n            raise ValueError(\n",
        SIDE,
    ),
]
