"""Faults of the gateway, of agents that are programs, and of the APIs' formats. See `faults`."""

from __future__ import annotations

from faults import Fault

GATEWAY_FAULTS = [
    Fault(
        "a retry is sampled again",
        "        return calls[-1] if again and calls else None",
        "        return None",
        "gateway/test_gateway_robustness.py::test_a_retry_gets_the_same_answer_and_nothing_is_sampled_again",
    ),
    Fault(
        "what is asked twice on purpose is answered once",
        "        return calls[-1] if again and calls else None",
        "        return calls[-1] if calls else None",
        "gateway/test_gateway_robustness.py::test_a_retry_gets_the_same_answer_and_nothing_is_sampled_again",
    ),
    Fault(
        "a client that leaves takes its call along",
        "        own = [leaving] if working is work else [working, leaving]",
        "        own = [working, leaving]",
        "gateway/test_gateway_robustness.py::test_the_library_itself_tries_again_after_a_lost_connection",
    ),
    Fault(
        "a call that nobody waits for goes on for ever",
        '            self._count("abandoned")\n            call.work.cancel()',
        '            self._count("abandoned")',
        "gateway/test_gateway_robustness.py::test_a_client_that_leaves_ends_its_call_after_a_while",
    ),
    Fault(
        "half a key is enough",
        "if calls is None or not hmac.compare_digest(given.encode(), secret.encode()):",
        "if calls is None:",
        "gateway/test_gateway_robustness.py::test_a_request_is_its_keys_and_no_other_key_is_taken",
    ),
    Fault(
        "a key outlives its episode",
        "        server.dismiss(key)\n",
        "",
        "gateway/test_gateway_robustness.py::test_the_end_of_the_episode_ends_calls_and_key",
    ),
    Fault(
        "an engine's failure is the agent's",
        "        if calls.failure is not None:\n            raise calls.failure",
        "        if False:\n            raise AssertionError",
        "gateway/test_gateway_chats.py::test_a_failing_engine_ends_the_episode_and_not_by_the_agents_fault",
    ),
    Fault(
        "the policy's text grades itself",
        '    return message if message is not None and message["id"] == name else None',
        "    return message",
        "envs/test_agent_commands.py::test_every_end_of_a_program_has_its_outcome",
    ),
    Fault(
        "a failed program has a score",
        "        if how:\n            return _failed(how)\n",
        "",
        "envs/test_agent_commands.py::test_every_end_of_a_program_has_its_outcome",
    ),
    Fault(
        "calls and thoughts of a turn are two messages",
        '            if "content" in turn or "tool_calls" in turn:',
        "            if turn:",
        "gateway/test_gateway_responses.py",
    ),
    Fault(
        "tools are not told to the template",
        '{**options, "tools": list(tools)} if tools else options',
        "options",
        "engine/server/test_serving_tools.py::test_prompts_with_tools_are_those_of_transformers",
    ),
]
