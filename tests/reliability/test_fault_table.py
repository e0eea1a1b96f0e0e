"""Table of the faults of an agent's parts: in each cell the tests that make it happen.

Each shows that the fault came about, that the attempt is an observation, `Unscorable` or an `InfraError` as `docs/agents.md`
says and never a score that is none, that nothing waits for ever, that no process is left, and that it is counted.
`test_faulty_parts.py` has all parts fail at random in a whole run.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
AGENT, TOOL = "envs/test_agent_faults.py", "envs/test_tool_faults.py"
COMMANDS, TOOLS, LOOP = "envs/test_agent_commands.py", "tools/test_tool_set.py", "tools/test_work_loop.py"
MCP, SERVERS = "tools/test_mcp_faults.py", "tools/test_mcp_server.py"
SANDBOX, PROGRAMS = "sandbox/test_sandbox_faults.py", "sandbox/test_executions.py"
GATEWAY, CLIENTS = "gateway/test_gateway_faults.py", "gateway/test_gateway_robustness.py"

PARTS = ("agent", "tool", "MCP server", "sandbox", "gateway")
FAULTS = ("killed", "frozen", "slow", "wrong content", "huge", "half JSON", "10,000 calls")
TABLE: dict[tuple[str, str], list[str]] = {
    ("agent", "killed"): [f"{AGENT}::test_a_killed_agent", f"{COMMANDS}::test_every_end_of_a_program_has_its_outcome"],
    ("agent", "frozen"): [f"{AGENT}::test_a_frozen_agent", f"{AGENT}::test_a_frozen_agent_of_a_run_is_replaced"],
    ("agent", "slow"): [f"{AGENT}::test_a_slow_agent", f"{AGENT}::test_a_slow_episode_leaves_the_agent_of_a_run_alone"],
    ("agent", "wrong content"): [f"{AGENT}::test_a_lying_agent"],
    ("agent", "huge"): [f"{AGENT}::test_a_lying_agent"],
    ("agent", "half JSON"): [f"{AGENT}::test_a_lying_agent"],
    ("agent", "10,000 calls"): [
        f"{AGENT}::test_the_last_of_ten_thousand_verdicts_counts",
        f"{CLIENTS}::test_ten_thousand_calls_of_one_client_are_answered_and_other_episodes_go_on",
    ],
    ("tool", "killed"): [f"{TOOL}::test_a_tool_that_kills_or_stops_its_worker"],
    ("tool", "frozen"): [f"{TOOL}::test_a_tool_that_kills_or_stops_its_worker"],
    ("tool", "slow"): [f"{TOOL}::test_a_slow_tool", f"{TOOLS}::test_a_late_tool_is_an_observation"],
    ("tool", "wrong content"): [f"{TOOL}::test_a_lying_tool"],
    ("tool", "huge"): [f"{TOOL}::test_a_lying_tool", f"{TOOLS}::test_results_are_text_of_limited_length"],
    ("tool", "half JSON"): [f"{TOOL}::test_a_lying_tool", f"{TOOLS}::test_what_goes_wrong_is_an_observation"],
    ("tool", "10,000 calls"): [
        f"{TOOL}::test_ten_thousand_calls_in_one_reply_run_none",
        f"{TOOL}::test_ten_thousand_calls_that_run_are_counted",
        f"{LOOP}::test_the_last_call_ends_it",
    ],
    ("MCP server", "killed"): [f"{MCP}::test_a_killed_server", f"{SERVERS}::test_a_server_that_ends_is_started_again"],
    ("MCP server", "frozen"): [f"{MCP}::test_a_frozen_server", f"{SERVERS}::test_a_frozen_server_is_replaced"],
    ("MCP server", "slow"): [f"{MCP}::test_a_slow_server", f"{SERVERS}::test_a_slow_tool_is_late_and_its_server_lives"],
    ("MCP server", "wrong content"): [
        f"{MCP}::test_a_lying_server_makes_no_score",
        f"{SERVERS}::test_a_lying_server_over_http",
    ],
    ("MCP server", "huge"): [f"{MCP}::test_a_lying_server_makes_no_score", f"{SERVERS}::test_a_lying_server_over_http"],
    ("MCP server", "half JSON"): [f"{MCP}::test_half_an_answer_is_late", f"{SERVERS}::test_a_lying_server"],
    ("MCP server", "10,000 calls"): [f"{MCP}::test_ten_thousand_answers_to_one_call"],
    ("sandbox", "killed"): [
        f"{SANDBOX}::test_a_supervisor_that_is_killed_or_stopped_beside_its_program",
        f"{SANDBOX}::test_a_killed_sandbox_scores_nothing",
        f"{PROGRAMS}::test_a_supervisor_that_is_gone_is_no_result",
    ],
    ("sandbox", "frozen"): [
        f"{SANDBOX}::test_a_supervisor_that_is_killed_or_stopped_beside_its_program",
        f"{SANDBOX}::test_a_stopped_supervisor_is_no_result",
    ],
    ("sandbox", "slow"): [f"{SANDBOX}::test_a_slow_program_is_ended_and_counted"],
    ("sandbox", "wrong content"): [f"{SANDBOX}::test_a_lying_supervisor_is_no_result"],
    ("sandbox", "huge"): [
        f"{SANDBOX}::test_a_lying_supervisor_is_no_result",
        f"{PROGRAMS}::test_a_limit_ends_a_program_and_is_named",
    ],
    ("sandbox", "half JSON"): [f"{SANDBOX}::test_a_lying_supervisor_is_no_result"],
    ("sandbox", "10,000 calls"): [f"{SANDBOX}::test_ten_thousand_cases_end_at_the_budget"],
    ("gateway", "killed"): [f"{GATEWAY}::test_the_process_of_a_gateway_is_killed_or_stopped"],
    ("gateway", "frozen"): [f"{GATEWAY}::test_the_process_of_a_gateway_is_killed_or_stopped"],
    ("gateway", "slow"): [
        f"{GATEWAY}::test_a_slow_reply_is_asked_for_again_and_sampled_once",
        f"{CLIENTS}::test_a_client_that_leaves_ends_its_call_after_a_while",
    ],
    ("gateway", "wrong content"): [
        f"{GATEWAY}::test_a_lying_client_is_refused_and_counted",
        f"{CLIENTS}::test_a_body_of_any_kind_has_an_answer",
    ],
    ("gateway", "huge"): [f"{GATEWAY}::test_a_lying_client_is_refused_and_counted"],
    ("gateway", "half JSON"): [
        f"{GATEWAY}::test_a_lying_client_is_refused_and_counted",
        f"{CLIENTS}::test_a_body_that_does_not_come_to_its_end_keeps_nobody_waiting",
    ],
    ("gateway", "10,000 calls"): [
        f"{CLIENTS}::test_ten_thousand_calls_of_one_client_are_answered_and_other_episodes_go_on",
        f"{CLIENTS}::test_there_are_not_more_calls_at_a_time_than_the_chat_takes",
    ],
}


@cache
def defined_in(path: str) -> set[str]:
    tree = ast.parse((TESTS / path).read_text())
    return {each.name for each in tree.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("fault", FAULTS)
def test_each_cell_has_tests_and_they_are_there(part: str, fault: str) -> None:
    for named in TABLE[part, fault]:
        path, _, name = named.partition("::")
        assert name in defined_in(path), named


def test_there_are_no_other_cells() -> None:
    assert set(TABLE) == {(part, fault) for part in PARTS for fault in FAULTS}
