"""Faults of what an agent's parts count, and of what they do when they fail. See `faults`."""

from __future__ import annotations

from faults import Fault

PARTS_FAULTS = [
    Fault(
        "a worker that is killed takes its counts with it",
        "        if threading.get_ident() == home:\n            channel.tell(note)",
        "        if False:\n            channel.tell(note)",
        "envs/test_tool_faults.py::test_a_tool_that_kills_or_stops_its_worker",
    ),
    Fault(
        "a fault of the sandbox within a tool is observed",
        "        except EpisodeFailed as failed:  # such",
        "        except TimeoutError as failed:  # such",
        "envs/test_tool_faults.py",
    ),
    Fault(
        "a tool that cannot work is not counted",
        '            counts.add("unavailable", time.monotonic() - begin)\n',
        "",
        "envs/test_tool_faults.py",
    ),
    Fault(
        "what is asked of a gateway is counted in the first episode of its server",
        "        self._record = recorder_here()",
        "        self._record = lambda names: recorder_here()(names)",
        "gateway/test_gateway_faults.py",
    ),
    Fault(
        "a stopped agent of a run is late for ever",
        "        if not model.failing.done() and self._lines == lines:",
        "        if False:",
        "envs/test_agent_faults.py",
    ),
    Fault(
        "an agent that is slow in one episode is ended in all",
        "        if not model.failing.done() and self._lines == lines:",
        "        if not model.failing.done():",
        "envs/test_agent_faults.py",
    ),
    Fault(
        "thoughts that the template takes out stay before a call's result",
        'if str(parts.get("reasoning_content") or "").strip() in shown:',
        "if True:",
        "envs/test_attempt_trees.py::test_random_trees_of_clients_that_try_again[forgets-8]",
    ),
    Fault(
        "a repeated request of a client that has left is sampled anew",
        "        if left := [call for call in calls if call.left]:",
        "        if left := [call for call in calls if call.left and again]:",
        "envs/test_attempt_trees.py::test_random_trees_of_clients_that_try_again[appends-8]",
    ),
    Fault(
        "a failed server's process outlives the end of its tools",
        "self._ending = [each for each in (*self._ending, session) if not each.over]",
        "self._ending = []",
        "tools/test_mcp_faults.py",
    ),
]
