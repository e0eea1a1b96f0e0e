"""Faults to plant in the product, each with the tests that must notice it.

A fault is a line of the package and the line that takes its place. Lines are found by their text, wherever their module
lies, so that a module may move. `plant.py` applies one at a time and runs its tests.
"""

# ruff: noqa: E501
from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    name: str
    right: str  # occurs once in the package
    wrong: str
    tests: str  # paths, or path::test, separated by spaces; relative to tests/


FAULTS = [
    # the buffer and the controller
    Fault(
        "one slot too many",
        "self.slots = (max_lag + 1) * batch - window + 1",
        "self.slots = (max_lag + 1) * batch - window + 2",
        "controller/test_controller.py",
    ),
    Fault(
        "a window that is one too wide",
        "if group_id >= head + self.window and place >= places:",
        "if group_id > head + self.window and place >= places:",
        "controller/test_controller.py",
    ),
    Fault(
        "a dropped group is not sampled anew",
        "                self._quota += 1\n",
        "                self._quota += 0\n",
        "controller/test_controller.py",
    ),
    Fault(
        "tokens of an unknown policy are trained on",
        "        if not known(versions, [group]):",
        "        if False:",
        "controller/test_controller.py",
    ),
    Fault(
        "the update does not wait for the publication",
        '        served = await self._published(publishing)\n        with self.timeline.phase("check"):',
        '        served = publishing.result() if publishing.done() else Version(step)\n        with self.timeline.phase("check"):',
        "controller/test_controller.py",
    ),
    Fault(
        "engines and trainer need not agree",
        "            if self.hooks.agree:",
        "            if self.hooks.agree and step > 10**6:",
        "controller/test_controller.py controller/test_agreement.py",
    ),
    Fault(
        "a gross disagreement is let pass",
        "        if fault := GROSS[self._dtype].exceeded(gap):",
        "        if (fault := GROSS[self._dtype].exceeded(gap)) and gap.tokens < 0:",
        "controller/test_agreement.py",
    ),
    Fault(
        "a trained group does not end a barren stretch",
        "            self._drops = Drops()\n            await self.buffer.put(group)",
        "            await self.buffer.put(group)",
        "controller/test_controller.py",
    ),
    Fault(
        "a streamed part is not held against the whole",
        "            self._expect(all(map(_same, self.samples, update.samples)))",
        "            pass",
        "controller/test_streaming.py",
    ),
    # algorithms
    Fault(
        "reward at the first token",
        "rewards[np.cumsum(self.lengths) - 1] += self.rewards",
        "rewards[np.cumsum(self.lengths) - self.lengths] += self.rewards",
        "algorithms/test_advantages.py",
    ),
    Fault(
        "rloo without its factor",
        "* (size / np.maximum(size - 1, 1))",
        "* (size / np.maximum(size, 1))",
        "algorithms/test_advantages.py",
    ),
    Fault(
        "opo with equal weights",
        "baseline = np.bincount(index, x.lengths * centred) / np.bincount(index, x.lengths)",
        "baseline = np.bincount(index, centred) / np.bincount(index)",
        "algorithms/test_advantages.py",
    ),
    Fault(
        "dual clip from the wrong side",
        "torch.maximum(objective, dual_clip * a), objective)",
        "torch.minimum(objective, dual_clip * a), objective)",
        "algorithms/test_losses.py",
    ),
    Fault(
        "aipo without its cap",
        "return Loss(-(rho.clamp(max=cap) * x.advantages) * x.logprobs",
        "return Loss(-(rho * x.advantages) * x.logprobs",
        "algorithms/test_losses.py",
    ),
    Fault(
        "cispo lets the gradient through its ratio",
        "    r = ratio(x.logprobs.detach(), x.old)\n    clipped = (r < 1 - clip_low)",
        "    r = ratio(x.logprobs, x.old)\n    clipped = (r < 1 - clip_low)",
        "algorithms/test_losses.py",
    ),
    Fault(
        "a token without weight reaches the loss",
        "    keep = weights != 0\n",
        "    keep = weights >= 0\n",
        "algorithms/test_losses.py",
    ),
    Fault("k3 with its sign turned", "torch.expm1(-d) + d", "torch.expm1(d) - d", "algorithms/test_losses.py"),
    Fault(
        "tis lifts instead of cutting",
        "    return np.minimum(_exp(x.log_k), cap)",
        "    return np.maximum(_exp(x.log_k), cap)",
        "algorithms/test_corrections.py",
    ),
    Fault(
        "m2po drops what pushes inwards",
        "np.flatnonzero(x.advantages * x.log_k > 0)",
        "np.flatnonzero(x.advantages * x.log_k < 0)",
        "algorithms/test_corrections.py",
    ),
    Fault("opsm masks what is near", "/ x.lengths > delta", "/ x.lengths < delta", "algorithms/test_corrections.py"),
    Fault(
        "the sequence mean counts empty rows",
        "return np.maximum(lengths, 1), int(np.count_nonzero(lengths))",
        "return np.maximum(lengths, 1), len(lengths)",
        "algorithms/test_mixture.py algorithms/test_prepare.py",
    ),
    Fault(
        "masked overlong replies are trained",
        "trained = scores.lengths * counted * ~np.array(masked, bool)",
        "trained = scores.lengths * counted",
        "algorithms/test_prepare.py",
    ),
    Fault(
        "a cancelled attempt is trained",
        "isinstance(end.outcome, Score) and end.finish is not Finish.CANCELLED",
        "isinstance(end.outcome, Score)",
        "algorithms/test_prepare.py",
    ),
    Fault(
        "the entropy bonus has the wrong side of its target",
        "return weight if found[ENTROPY] <= s.target else 0.0, found",
        "return weight if found[ENTROPY] >= s.target else 0.0, found",
        "algorithms/test_entropy.py",
    ),
    # the engine
    Fault(
        "noise that does not depend on the position",
        "counter = (positions.astype(np.uint64) + np.uint64(1)) * _STEP",
        "counter = (positions.astype(np.uint64) * np.uint64(0) + np.uint64(1)) * _STEP",
        "engine/native/test_engine_sampler.py",
    ),
    Fault(
        "top-p leaves the token out that crosses it",
        "before = mass.cumsum(dim=-1) - mass",
        "before = mass.cumsum(dim=-1)",
        "engine/native/test_engine_sampler.py",
    ),
    Fault(
        "truncated logprobs are not renormalised",
        "kept = kept - kept.logsumexp(dim=-1, keepdim=True)",
        "kept = kept - 0 * kept.logsumexp(dim=-1, keepdim=True)",
        "engine/native/test_engine_sampler.py",
    ),
    Fault(
        "the model's logprob is the sampled one",
        "of_model = model.gather(1, tokens) if tempered or truncated.any() else chosen",
        "of_model = chosen",
        "engine/native/test_engine_sampler.py engine/native/test_engine_parity.py",
    ),
    Fault(
        "the oldest sequence is preempted first",
        "self.preempt(next(reversed(self.running.values())))",
        "self.preempt(next(iter(self.running.values())))",
        "engine/native/test_engine_blocks.py engine/native/test_engine_core.py",
    ),
    Fault(
        "a whole prompt is taken from the cache",
        "min(len(shared) * self.blocks.page_size, len(tokens) - 1)",
        "min(len(shared) * self.blocks.page_size, len(tokens))",
        "engine/native/test_engine_blocks.py engine/native/test_engine_core.py",
    ),
    Fault(
        "shared pages are written to",
        "np.where(position < self._shared[slot], NULL_PAGE, self.table[slot, page])",
        "self.table[slot, page]",
        "engine/native/test_engine_blocks.py engine/native/test_engine_core.py engine/native/test_engine_parity.py",
    ),
    Fault(
        "pages are freed from the beginning",
        "for page in reversed(list(pages)):",
        "for page in list(pages):",
        "engine/native/test_engine_blocks.py",
    ),
    Fault(
        "only the first stop id stops",
        "        for stops in self.stops[1:]:\n            found |=",
        "        for stops in self.stops[2:]:\n            found |=",
        "engine/native/test_engine_core.py engine/native/test_engine_parity.py",
    ),
    Fault(
        "a completion's tokens all have the last version",
        "        steps[begin:] = source.step",
        "        steps[:] = source.step",
        "engine/native/test_engine_core.py engine/native/test_engine_proof.py",
    ),
    Fault(
        "an old version may be committed",
        "if new.key < now.key:",
        "if new.incarnation < now.incarnation:",
        "engine/native/test_engine_core.py engine/native/test_engine_proof.py",
    ),
    Fault(
        "a prompt keeps the KV of the version before",
        "begun = sequence.slot >= 0 and not sequence.released and sequence.salt == salt",
        "begun = False",
        "engine/native/test_engine_core.py engine/native/test_engine_proof.py",
    ),
    # weights in motion
    Fault(
        "what was staged need not be what was announced",
        "if held.fingerprint != version.fingerprint:",
        "if not held.fingerprint:",
        "engine/native/test_engine_proof.py weight_sync/test_mutations.py",
    ),
    Fault(
        "what is served is not looked at again",
        "if other := next((name for name in words if found.get(name) != words[name]), None):",
        "if other := next((name for name in words if name not in found), None):",
        "engine/native/test_engine_proof.py weight_sync/test_mutations.py",
    ),
    Fault(
        "a slot that was overwritten is read on",
        "if os.pread(fd, _HEADER.size, 0) != before:",
        "if len(os.pread(fd, _HEADER.size, 0)) != len(before):",
        "weight_sync/test_transports.py weight_sync/test_damage.py",
    ),
    Fault(
        "a manifest's digest is not compared",
        "if hashlib.blake2b(raw, digest_size=32).digest() != header.digest:",
        "if not header.digest:",
        "weight_sync/test_damage.py weight_sync/test_transports.py",
    ),
    Fault(
        "the fingerprint does not see where an element lies",
        "    return _random(2**32 + run)\n",
        "    return _random(2**32)\n",
        "models/test_fingerprint.py",
    ),
    # the trainer
    Fault(
        "the gradient is scaled twice",
        "factor = scale * min(1.0, limit / norm) if limit and norm else scale",
        "factor = scale * scale * min(1.0, limit / norm) if limit and norm else scale",
        "trainer/test_optimizer.py trainer/test_native_trainer.py",
    ),
    Fault(
        "norms and biases decay",
        "self._step([name for name, p in self.named.items() if p.ndim < 2], lr, 0.0)",
        "self._step([name for name, p in self.named.items() if p.ndim < 2], lr, decay)",
        "trainer/test_optimizer.py",
    ),
    Fault(
        "a shared prompt is as long as its row",
        "    shared = int(differing.argmax()) if differing.any() else n\n",
        "    shared = n\n",
        "trainer/test_batch.py trainer/test_gradients.py",
    ),
    Fault(
        "rows without an advantage get a gradient",
        "        trained &= sample.advantages != 0\n",
        "        trained |= sample.advantages != 0\n",
        "trainer/test_native_trainer.py trainer/test_gradients.py",
    ),
    # what is recorded
    Fault(
        "a record's checksum is not looked at",
        "    if _checksum(group_id, place, count, payload) != at.crc:\n        raise",
        "    if at.crc < 0:\n        raise",
        "ledger/test_segments.py",
    ),
    Fault(
        "a group may be dropped after it was trained",
        '"dropped_after = (SELECT max(step) FROM live_steps) WHERE id = ? AND fate IS NULL",',
        '"dropped_after = (SELECT max(step) FROM live_steps) WHERE id = ?",',
        "ledger/test_ledger.py ledger/test_ledger_conservation.py",
    ),
    Fault(
        "a version may be published with another fingerprint",
        "            if known != version.fingerprint:",
        "            if not known:",
        "ledger/test_ledger.py",
    ),
    Fault(
        "a checkpoint's files are not read again",
        "            if _digest(found[name]) != file.blake2b:",
        "            if not file.blake2b:",
        "run/storage/test_checkpoints.py",
    ),
    Fault(
        "a group is trained again too often",
        "if uses < self._settings.times]",
        "if uses <= self._settings.times]",
        "run/test_replay_runs.py",
    ),
    # environments and rewards
    Fault(
        "every epoch has the same order",
        'draw = random.Random(derive_seed(seed, "order", epoch))',
        'draw = random.Random(derive_seed(seed, "order"))',
        "envs/test_curriculum.py envs/test_make.py envs/test_several.py",
    ),
    Fault(
        "the end token is part of the text",
        "spoken = reply.tokens[:-1] if reply.finish is Finish.STOP else reply.tokens",
        "spoken = reply.tokens",
        "envs/test_chat.py",
    ),
    Fault(
        "an infinite reward is a score",
        "    if not math.isfinite(number):\n        return InfraError",
        "    if math.isnan(number):\n        return InfraError",
        "envs/rewards envs/reward_workers/test_pool.py",
    ),
    Fault(
        "a worker is kept with what it left running",
        "if ends and frame.children:",
        "if False:",
        "envs/reward_workers/test_pool.py envs/reward_workers/test_reward_faults.py",
    ),
    Fault(
        "a breaker that never opens",
        "if len(latest) < LEAST or share <= self.limit:",
        "if len(latest) < LEAST or share <= 1:",
        "controller/test_breaker.py",
    ),
    Fault(
        "a restart's budget is never spent",
        "        if len(self._spent) >= self.restarts:",
        "        if len(self._spent) > self.restarts:",
        "controller/test_supervision.py",
    ),
    Fault(
        "an attempt without a score counts for nothing",
        "accuracy = float((rewards >= SOLVED).sum()) / n",
        "accuracy = float((rewards >= SOLVED).mean())",
        "controller/test_rollout_outcomes.py cli/commands/test_evaluate.py run/test_warmup.py",
    ),
    # processes and the network
    Fault(
        "any token opens the door",
        "if len(frames) != 4 or not hmac.compare_digest(frames[1].bytes, self._token):",
        "if len(frames) != 4 or not frames[1].bytes:",
        "runtime/test_rpc.py test_security.py",
    ),
    Fault(
        "a call that is late goes on at the peer",
        '            future.cancel()\n            await self._send(wire.Cancel(request.id), b"")\n            raise PeerTimeout',
        "            future.cancel()\n            raise PeerTimeout",
        "runtime/test_rpc.py",
    ),
    Fault(
        "a stop string may be cut in two",
        "keep = min((begin for begin, _, _ in self._begun), default=len(text))",
        "keep = len(text)",
        "engine/server/test_serving_text.py",
    ),
    # promises that an attack once broke: an episode that fails before its first reply ends nothing
    Fault(
        "an exception before the first reply ends the run",
        "        except Exception as error:  # the environment is the user's code",
        "        except ConnectionError:\n            raise\n        except Exception as error:  # the environment is the user's code",
        "controller/test_attempts_without_a_reply.py",
    ),
    Fault(
        "an attempt of no tokens is measured like one that replied",
        "for place, t in enumerate(rows) if t.learnt.any()):",
        "for place, t in enumerate(rows)):",
        "run/test_failing_episodes.py",
    ),
    Fault(
        "an attempt of no tokens takes the figures of the next",
        "    some = counts > 0  #",
        "    some = counts >= 0  #",
        "ledger/test_rows.py",
    ),
    Fault(
        "a group of no tokens has an age",
        "return min((t.oldest for t in self.trajectories if t.mask.any()), default=None)",
        "return min((t.oldest for t in self.trajectories), default=None)",
        "controller/test_attempts_without_a_reply.py",
    ),
    Fault(
        "a worker that exits twice ends the run",
        "            if isinstance(error, WorkerLost) and not again:\n                return await self.play(",
        "            if isinstance(error, WorkerLost):\n                if again:\n                    raise\n                return await self.play(",
        "envs/test_environment_workers.py::test_what_costs_a_worker_costs_two_and_no_more_than_its_episodes",
    ),
    Fault(
        "a message without content is taken",
        "    if not messages or not all(is_message(m) for m in messages):",
        "    if not messages:",
        "envs/test_chat.py envs/test_bounded.py controller/test_attempts_without_a_reply.py",
    ),
    Fault(
        "a worker may send a message of any form",
        "    if not all(is_message(each) for each in message):",
        "    if False:",
        "envs/test_environment_workers.py::test_what_an_episode_gets_wrong_is_its_own_affair",
    ),
    Fault(
        "a worker may send a message of any length",
        "    if len(text) > wire.MAX_FRAME:",
        "    if False:",
        "envs/test_environment_workers.py::test_what_an_episode_gets_wrong_is_its_own_affair",
    ),
    Fault(
        "a prompt may fill the context",
        "        if length >= self._context:",
        "        if False:",
        "envs/test_chat.py",
    ),
    Fault(
        "a reply of less than nothing may be asked for",
        "    if count is not None and count < 1:",
        "    if count is not None and count < -1:",
        "controller/test_attempts_without_a_reply.py",
    ),
    Fault(
        "an attempt without a reply keeps its score",
        "        if not chat.sampled and not isinstance(outcome, Unscorable | InfraError):",
        "        if not chat.sampled and outcome is None:",
        "controller/test_attempts_without_a_reply.py",
    ),
    # promises: every connection to `serve` has a deadline in every state
    Fault(
        "a refused request's body may take for ever",
        "        if state is not None:\n            self._deadline",
        "        if state is h11.IDLE:\n            self._deadline",
        "engine/server/test_serving_connections.py::test_who_is_refused_is_not_waited_for",
    ),
    Fault(
        "each byte puts a connection's deadline off",
        "        if state is self._state and (state is None or self._deadline is not None):",
        "        if state is self._state and state is None:",
        "engine/server/test_serving_connections.py::test_who_is_refused_is_not_waited_for",
    ),
    Fault(
        "a request's head may take for ever",
        "        if state is not None:\n            self._deadline",
        "        if state is h11.SEND_BODY:\n            self._deadline",
        "engine/server/test_serving_deadlines.py::test_a_head_has_a_deadline",
    ),
    Fault(
        "a request's body may take for ever",
        "        async with asyncio.timeout(BODY_S):",
        "        async with asyncio.timeout(None):",
        "engine/server/test_serving_deadlines.py::test_a_body_has_a_deadline",
    ),
    Fault(
        "a reply that nobody takes is kept for ever",
        "        super().pause_writing()\n",
        "        super().pause_writing()\n        return\n",
        "engine/server/test_serving_deadlines.py::test_a_reply_that_is_not_taken_ends_the_request",
    ),
    Fault(
        "the end of a reply may be left untaken",
        "        transport.set_write_buffer_limits(high=0)  #",
        "        #",
        "engine/server/test_serving_connections.py::test_a_connection_that_ends_with_untaken_bytes_has_a_deadline",
    ),
    Fault(
        "whoever only waits keeps the room of who comes",
        "        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:",
        "        if False:",
        "engine/server/test_serving_connections.py::test_who_only_waits_makes_room_for_who_comes",
    ),
    # promises: a large prompt, a template that loops and a huge rendering hold up nobody and keep no memory
    Fault(
        "a prompt's length is known once it is tokenized",
        "        if bounded and self._reach is not None and self._reach.exceeds(text, self._context):",
        "        if False:",
        "engine/server/test_reading.py::test_lengths_are_bounded_before_anything_is_tokenized",
    ),
    Fault(
        "a chat's length is known once it is tokenized",
        "            if reach.exceeds(text, context):",
        "            if False:",
        "engine/server/test_reading.py::test_lengths_are_bounded_before_anything_is_tokenized",
    ),
    Fault(
        "a long prompt is tokenized on the event loop",
        "        if len(text) <= HERE:\n",
        "        if len(text) <= 10**9:\n",
        "engine/server/test_reading.py",
    ),
    Fault(
        "long and short chats wait in one line",
        "        lane = self._short if size <= SHORT else self._long\n",
        "        lane = self._short\n",
        "engine/server/test_reading.py::test_what_is_long_keeps_nobody_waiting_and_no_memory",
    ),
    Fault(
        "a template may loop for ever",
        "        self._socket.settimeout(limit_s)\n",
        "        self._socket.settimeout(None)\n",
        "engine/server/test_reading.py::test_a_template_that_misbehaves_is_a_400_and_the_next_chat_is_rendered",
    ),
    Fault(
        "a rendering may take any memory",
        "            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n",
        "            pass\n",
        "engine/server/test_reading.py::test_a_template_that_misbehaves_is_a_400_and_the_next_chat_is_rendered",
    ),
    Fault(
        "the memory of a long chat is kept",
        "        if not fork.grown():\n",
        "        if True:\n",
        "engine/server/test_reading.py::test_what_is_long_keeps_nobody_waiting_and_no_memory",
    ),
    Fault(
        "a large body is decoded on the event loop",
        "        return await in_thread(work, *given)\n    finally:\n        if len(raw) >= LARGE:",
        "        return work(*given)\n    finally:\n        if len(raw) >= LARGE:",
        "engine/server/test_serving_sizes.py::test_a_large_body_is_looked_at_beside_the_loop",
    ),
    Fault(
        "the memory of a large body is kept",
        "        if len(raw) >= LARGE:\n",
        "        if len(raw) >= LARGE << 9:\n",
        "engine/server/test_serving_sizes.py::test_the_memory_of_a_large_body_is_given_back",
    ),
    Fault(
        "a body may have any number of parts",
        "    check_parts(raw)\n    try:",
        "    try:",
        "engine/server/test_serving_sizes.py::test_too_many_parts_are_refused_before_they_are_decoded",
    ),
    # promises: what a reward or an environment started ends with the run
    Fault(
        "orphans of a worker are nobody's",
        "    prctl(_PR_SET_CHILD_SUBREAPER, 1)\n",
        "",
        "runtime/workers/test_keeping.py",
    ),
    Fault(
        "a worker's end leaves what it started",
        "    end_all()\n    if how is not None",
        "    if how is not None",
        "runtime/workers/test_keeping.py",
    ),
    Fault(
        "a keeper outlives who started it",
        "    die_with_parent(when)\n",
        "",
        "runtime/workers/test_keeping.py",
    ),
    Fault(
        "a keeper that was stopped is left so",
        "(signal.SIGTERM, signal.SIGCONT) if spared",
        "(signal.SIGTERM,) if spared",
        "runtime/workers/test_keeping.py",
    ),
    Fault(
        "a worker's mark is not looked for",
        'if pid.isdigit() and mark in _read(pid, "environ")] if PROC else []',
        'if pid.isdigit() and mark in _read(pid, "environ")][:0]',
        "runtime/workers/test_keeping.py",
    ),
    Fault(
        "a run does not say that programs can outlive it",
        "        if not keeper.KEEPERS:\n            self.note(",
        "        if keeper.KEEPERS is None:\n            self.note(",
        "run/test_session.py::test_a_system_where_programs_can_outlive_the_run_is_told_of",
    ),
    Fault(
        "doctor does not say that programs can outlive a run",
        'unless(not keeper.KEEPERS, "scoring"',
        'unless(keeper.KEEPERS is None, "scoring"',
        "cli/commands/test_doctor.py::test_a_system_where_programs_can_outlive_a_run_is_warned_of",
    ),
    # promises: a payload that cannot be read costs its step and the later ones, never the run
    Fault(
        "a step that cannot be read is trained again",
        "    if not lost:\n        return begun\n",
        "    return begun\n",
        "run/test_unreadable_payloads.py::test_it_goes_on_from_before_the_step_that_cannot_be_read",
    ),
    Fault(
        "what was trained before the damage is left out",
        "    return undone.first\n",
        "    return first\n",
        "run/test_unreadable_payloads.py::test_it_goes_on_from_before_the_step_that_cannot_be_read",
    ),
    Fault(
        "steps that are sampled anew keep their incarnation",
        "        return latest + undone\n",
        "        return latest\n",
        "run/test_unreadable_payloads.py::test_it_goes_on_from_before_the_step_that_cannot_be_read",
    ),
    Fault(
        "unreadable groups have the fate of the others",
        "(UNREADABLE if each in unreadable else UNDONE, now, each)",
        "(UNDONE, now, each)",
        "ledger/test_repairs.py",
    ),
    Fault(
        "it is not said how many groups cannot be read",
        '    note(\n        f"{count} group',
        '    str(\n        f"{count} group',
        "run/test_unreadable_payloads.py::test_it_goes_on_from_before_the_step_that_cannot_be_read",
    ),
    Fault(
        "a group that waits is trained unread",
        "                    self._renounce_lost()\n",
        "",
        "run/test_unreadable_payloads.py::test_it_goes_on_from_before_the_step_that_cannot_be_read",
    ),
    # promises: the cache of warm-ups is private and verified
    Fault(
        "a kept warm-up is open to others",
        "        path.chmod(0o700 if path.is_dir() else 0o600)",
        "        path.chmod(0o755 if path.is_dir() else 0o644)",
        "run/test_warm_starts.py::test_what_is_kept_is_private",
    ),
    Fault(
        "the folder of kept warm-ups stays open to others",
        "            self.folder.chmod(0o700)\n",
        "",
        "run/test_warm_starts.py::test_a_cache_of_another_user_or_open_to_others_is_not_used",
    ),
    Fault(
        "a warm-up that others may write is used",
        "_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH",
        "_OTHERS_WRITE = 0",
        "run/test_warm_starts.py::test_one_that_is_not_as_it_was_written_is_not_used",
    ),
    Fault(
        "a warm-up of another user is used",
        "    if found.st_uid != os.geteuid():",
        "    if found.st_uid < 0:",
        "run/test_warm_starts.py::test_a_cache_of_another_user_or_open_to_others_is_not_used",
    ),
    Fault(
        "a kept warm-up is used unverified",
        "    verify(folder, warmed.steps)\n",
        "",
        "run/test_warm_starts.py::test_one_that_is_not_as_it_was_written_is_not_used",
    ),
    Fault(
        "a kept warm-up has no manifest",
        "    seal(folder, Position(warmed.steps, 0, 0), threading.Event())\n",
        "",
        "run/test_warm_starts.py::test_what_is_kept_is_private",
    ),
    Fault(
        "a damaged warm-up ends the run",
        '            self.note(f"the warm-up kept in',
        '            raise ConfigError(f"the warm-up kept in',
        "run/test_warm_starts.py::test_one_that_is_not_as_it_was_written_is_not_used",
    ),
    # promises: what is smaller, one by one
    Fault(
        "a reader that leaves ends the command",
        "                self.failure = error\n                self._lost(error)",
        "                raise",
        "cli/commands/test_streams.py",
    ),
    Fault(
        "a closed stream's number goes to the next file",
        "    _open_all()\n    out =",
        "    out =",
        "cli/commands/test_streams.py",
    ),
    Fault(
        "a finished run fails with its output",
        '_KEEP = {"demo", "train"}',
        '_KEEP = {"demo"}',
        "cli/commands/test_streams.py",
    ),
    Fault(
        "a terminal of few characters ends the command",
        "errors=DEGRADE, line_buffering=line",
        'errors="strict", line_buffering=line',
        "cli/commands/test_streams.py",
    ),
    Fault(
        "a run folder that is gone is a traceback",
        "        if self.folder.gone:\n",
        "        if False:\n",
        "run/storage/test_run_files.py run/test_run_folder.py",
    ),
    Fault(
        "a run folder that is gone leaves a husk",
        "            self.folder.sweep()\n",
        "",
        "run/storage/test_run_files.py run/test_run_folder.py",
    ),
    Fault(
        "the API key is not read from the environment",
        "given if given is not None else os.environ.get(KEY_VARIABLE)",
        "given",
        "engine/server/test_serve_command.py::test_where_the_key_comes_from",
    ),
    Fault(
        "the API key is not read from a file",
        "    key = serve.key_of(api_key, api_key_file)\n",
        "    key = serve.key_of(api_key, None)\n",
        "engine/server/test_serve_command.py::test_the_command_serves_with_that_key",
    ),
    Fault(
        "the ledger's pages are not checked",
        "                    check_pages(self._db, folder)\n",
        "",
        "ledger/test_integrity.py",
    ),
    Fault(
        "text of a damaged page is a traceback",
        "    except (sqlite3.Error, OSError, UnicodeDecodeError) as error:",
        "    except OSError as error:",
        "ledger/test_integrity.py",
    ),
    Fault(
        "a lost log is passed over",
        "    if newest <= known:\n",
        "    if newest <= known + 100:\n",
        "ledger/test_integrity.py",
    ),
    Fault(
        "a lost ledger is begun again in silence",
        '    if mode == "create" and left and not has_ledger(folder):',
        "    if False:",
        "ledger/test_integrity.py",
    ),
    Fault(
        "a checkpoint may know more steps than the ledger",
        "    if position.step > begun:\n",
        "    if position.step > begun + 9:\n",
        "run/storage/test_run_files.py",
    ),
    Fault(
        "a status that was made by hand is taken",
        "        msgspec.convert(value, kind or dict)\n",
        "        str(kind)\n",
        "run/storage/test_run_files.py",
    ),
    Fault(
        "a pipe in the place of weights is waited for",
        "        if (path.exists() or path.is_symlink()) and not path.is_file():",
        "        if path.is_dir():",
        "models/test_folders.py::test_what_is_no_file_is_refused_and_not_waited_for",
    ),
    Fault(
        "weights that are no numbers are served",
        "                if not _finite(tensor):\n",
        "                if False:\n",
        "models/test_folders.py::test_weights_that_are_no_numbers_are_refused_with_their_name",
    ),
    Fault(
        "a template's error is the engine's",
        "    except Exception as error:  # a template may raise anything: it is a program",
        "    except FloatingPointError as error:  # a program",
        "engine/server/test_reading.py::test_a_template_that_misbehaves_is_a_400_and_the_next_chat_is_rendered",
    ),
    Fault(
        "a folder that cannot be read fits",
        "        expect_readable(config)\n    except",
        "        pass\n    except",
        "cli/commands/test_check.py::test_a_folder_that_train_could_not_read_does_not_fit",
    ),
    Fault(
        "memory limits of the older kind are passed over",
        '    groups += [(group, *older) for group in _groups("memory", "memory")]\n',
        "",
        "core/test_machine.py",
    ),
    Fault(
        "too few descriptors are noticed when they run out",
        "    if (allowed := allow_files(needed)) < needed:",
        "    if (allowed := allow_files(needed)) < 0:",
        "run/storage/test_run_files.py::test_too_few_open_files_are_said_at_the_start",
    ),
    Fault(
        "there are more connections than descriptors",
        "    return min(CONNECTIONS, max(soft - _SPARE, soft // 4))",
        "    return CONNECTIONS",
        "engine/server/test_serve_command.py::test_there_are_no_more_connections_than_descriptors",
    ),
    Fault(
        "a body may have two lengths",
        'if b"transfer-encoding" in names and (',
        'if b"transfer-encoding" not in names and (',
        "engine/server/test_serving_connections.py::test_heads_that_are_refused_close_the_connection",
    ),
    Fault(
        "a path of any length reaches the application",
        "> MOST_TARGET:",
        "> MOST_TARGET << 9:",
        "engine/server/test_serving_connections.py::test_heads_that_are_refused_close_the_connection",
    ),
    Fault(
        "a path that the system does not take is a traceback",
        "    except (TidemillError, ValueError, OSError) as error:",
        "    except (TidemillError, ValueError) as error:",
        "run/test_bad_input.py::test_paths_that_are_longer_than_the_system_takes_are_one_sentence",
    ),
    # which device does what
    Fault(
        "theta is the share of the wrong role",
        "            return self.sample_s / (self.train_s + self.sample_s)",
        "            return self.train_s / (self.train_s + self.sample_s)",
        "run/planner/test_split.py",
    ),
    Fault(
        "a role's batch is larger than its memory",
        "        fits = min(asked, room / self.batch_bytes if self.batch_bytes else math.inf)",
        "        fits = asked",
        "run/planner/test_split.py",
    ),
    Fault(
        "every trainer device holds the whole state",
        "        room = memory - self.device_bytes - self.state_bytes / devices",
        "        room = memory - self.device_bytes - self.state_bytes",
        "run/planner/test_split.py",
    ),
    Fault(
        "a role sees another device than the one it was given",
        'seen.split(",")[number].strip() if seen else str(number)',
        "str(number)",
        "runtime/test_local.py::test_a_role_sees_the_device_it_was_given",
    ),
    # trainer and engines on one device
    Fault(
        "the trainer's turn begins before an evaluation has ended",
        "        await self._published(publishing)\n        await self._settled()",
        "        await self._settled()",
        "controller/test_device_turns.py",
    ),
    Fault(
        "a deterministic run pauses groups of the present weights",
        "        await self._published(publishing)\n        await self._settled()",
        "        await self._published(publishing)",
        "controller/test_device_turns.py",
    ),
    Fault(
        "an engine that joins in the trainer's turn takes its memory",
        "                if self._asleep_since is not None:\n                    await member",
        "                if False:\n                    await member",
        "controller/test_device_turns.py",
    ),
    Fault(
        "an episode's limit runs on in the trainer's turn",
        "(left := end - clock() + paused_s()) > 0:",
        "(left := end - clock()) > 0:",
        "controller/test_device_turns.py",
    ),
    Fault(
        "an engine that sleeps is taken for stuck",
        'self._activity.counters["steps"] + self._activity.slept_s',
        'self._activity.counters["steps"]',
        "engine/native/test_engine_core.py::test_sleep_and_wake",
    ),
    Fault(
        "an engine that sleeps keeps its spare weights",
        "            self._staging.forget()\n",
        "            pass\n",
        "engine/native/test_sleep.py",
    ),
    Fault(
        "weights are given back that cannot come again",
        "        if weights:\n            self._updates.expect_remembered()\n",
        "",
        "engine/native/test_sleep.py",
    ),
    Fault(
        "what the prefix cache lost is not counted",
        "fall_asleep(self._scheduler.blocks.cached_tokens)",
        "fall_asleep(0)",
        "engine/native/test_sleep.py",
    ),
    Fault(
        "a number of engines that is the default is not kept",
        'placement.engines if "engines" in placement.model_fields_set else None',
        "placement.engines if placement.engines > 1 else None",
        "run/planner/test_device_plan.py",
    ),
    Fault(
        "an engine is started on the trainer's device",
        "        resources = Resources(threads, self.plan.devices.of(role, name))",
        "        resources = Resources(threads, self.plan.devices.trainer[0])",
        "run/planner/test_device_plan.py",
    ),
    Fault(
        "a device that is not there is accepted",
        "    if max(found) >= visible:",
        "    if max(found) > visible:",
        "run/planner/test_device_plan.py",
    ),
    Fault(
        "memory of engines on devices of their own adds up",
        "            sum(p.devices.count(device) * h.bytes for p in found for h in p.held if not h.lazy),",
        "            sum(p.count * h.bytes for p in found if device in p.devices for h in p.held if not h.lazy),",
        "run/planner/test_device_plan.py",
    ),
    Fault(
        "a placed role looks for its device by the number of another process",
        '({"device": "cuda"} if devices[0] else {} for',
        '({"device": devices[0]} if devices[0] else {} for',
        "run/planner/test_device_plan.py",
    ),
    Fault(
        "training on several devices is measured as if on one",
        'record["devices/train"] * record.get("time/trainer/train", 0.0)',
        'record.get("time/trainer/train", 0.0)',
        "run/planner/test_device_plan.py",
    ),
    Fault(
        "trainer and engines on one device do not take turns",
        'or (placement.share == "auto" and devices.shared)',
        'or (placement.share == "auto" and False)',
        "run/planner/test_device_plan.py",
    ),
]
