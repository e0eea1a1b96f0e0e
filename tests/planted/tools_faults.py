"""Faults of tools: what a policy calls, within which limits, and what it is told. See `faults`."""

from __future__ import annotations

from faults import Fault

TOOLS_FAULTS = [
    Fault(
        "methods of one object overlap",
        "limit_s, place = own.limit_s or self._limit_s, self._places.get(id(own.owner))",
        "limit_s, place = own.limit_s or self._limit_s, None",
        "tools/test_tool_set.py",
    ),
    Fault(
        "a late call leaves its thread's place to others",
        "        held.append(_threads)",
        "        _threads.leave()",
        "tools/test_tool_set.py",
    ),
    Fault(
        "a call that is cancelled while it is given a place keeps it",
        "            if not turn.cancel():\n                self.leave()\n            raise",
        "            turn.cancel()\n            raise",
        "tools/test_tool_set.py",
    ),
    Fault(
        "arguments that a tool does not have reach it",
        "    closed: bool = True  # arguments",
        "    closed: bool = False  # arguments",
        "tools/test_tool_set.py",
    ),
    Fault(
        "a tool's exception ends the episode",
        "        except Exception as error:  # a user's tool may raise anything",
        "        except OSError as error:",
        "tools/test_tool_set.py envs/test_trl_environment.py",
    ),
    Fault(
        "a tool that cannot work is observed",
        "        except ToolUnavailable:\n            raise\n",
        "",
        "tools/test_tool_set.py tools/test_work_loop.py",
    ),
    Fault(
        "true passes for a number",
        '        case bool():\n            return "boolean"',
        '        case bool():\n            return "integer"',
        "tools/test_argument_check.py",
    ),
    Fault(
        "all calls of a reply run, however many",
        "elif (calls or reply.faults) and len(results) + len(calls) > max_calls:",
        "elif (calls or reply.faults) and len(results) > max_calls:",
        "tools/test_work_loop.py",
    ),
    Fault(
        "what is wrong with a call is told beside other results only",
        '        messages.append({"role": "user", "content": told})',
        "        pass",
        "tools/test_work_loop.py",
    ),
    Fault(
        "two episodes play with one instance",
        "            return free.pop()",
        "            return free[-1]",
        "envs/test_trl_environment.py",
    ),
    Fault(
        "a demonstration is learnt up to its first reply",
        "            turns.append((heard, message))",
        "            turns = turns or [(heard, message)]",
        "run/test_demonstrations.py",
    ),
]
