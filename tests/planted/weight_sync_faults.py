"""Faults to plant in weight sync: changes sent instead of whole versions. See `faults.py`."""

from __future__ import annotations

from faults import Fault

WEIGHT_SYNC_FAULTS = [
    Fault(
        "a change is applied to another base than its own",
        "        if held is None or held[0] != update.base:",
        "        if held is None:",
        "weight_sync/test_deltas.py",
    ),
    Fault(
        "an engine takes a change of weights that it does not serve",
        '        if update.kind == "delta" and served is not None and update.base != served:',
        '        if update.kind == "delta" and served is not None and update.base.policy != served.policy:',
        "core/test_weight_update.py",
    ),
    Fault(
        "a manifest may name another base than was announced",
        "        if (manifest.kind, manifest.base) != (update.kind, update.base):",
        "        if False:",
        "weight_sync/test_deltas.py",
    ),
    Fault(
        "what broke off half-way passes for a base",
        "        self._version = None\n        if not copies:",
        "        if not copies:",
        "weight_sync/test_deltas.py",
    ),
    Fault(
        "a version that was never sent is the next one's base",
        "        base, self._version = self._version, None",
        "        base = self._version",
        "weight_sync/test_deltas.py",
    ),
    Fault(
        "the sender forgets what it sent last",
        "            old.tensor.copy_(piece.tensor.detach())",
        "            pass",
        "weight_sync/test_deltas.py",
    ),
    Fault(
        "no version is full but the first",
        "self._since + 1 >= self._full_every",
        "self._since < 0",
        "weight_sync/test_deltas.py",
    ),
    Fault(
        "zeros of both signs are one value",
        "    if torch.equal(_integers(old), _integers(new)):",
        "    if torch.equal(old, new):",
        "weight_sync/test_delta_coding.py",
    ),
    Fault(
        "a place behind the end is written",
        "    if len(places) != changed or places[-1] >= count:",
        "    if len(places) != changed:",
        "weight_sync/test_delta_coding.py",
    ),
    Fault(
        "a frame is unpacked whatever its size",
        "        if zstandard.frame_content_size(frame) != length:",
        "        if False:",
        "weight_sync/test_delta_coding.py",
    ),
    Fault(
        "an engine without the base gets nothing",
        "    except BaseMissing:\n        lacking.append(member)",
        "    except BaseMissing:\n        pass",
        "engine/native/test_delta_updates.py",
    ),
    Fault(
        "a copy changes while it is sent",
        "        async with self._steady:  # a copy that is being sent does not change",
        "        async with asyncio.Lock():",
        "engine/native/test_delta_updates.py",
    ),
    Fault(
        "ranks may send changes of different versions",
        "each.base != first.base",
        "each.kind != first.kind",
        "controller/test_trainer_group.py",
    ),
]
