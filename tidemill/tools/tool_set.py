"""ToolSet: runs the calls that a policy makes, and turns whatever comes of them into messages for it.

A call that cannot be read, an unknown tool, wrong arguments, an exception and a late tool are observations: the policy has
to learn from them. Only `ToolUnavailable` passes, which a tool raises when it cannot work for a cause outside the policy.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from functools import partial
from typing import Any

from tidemill.core.episode_counts import counted
from tidemill.core.errors import ConfigError, EpisodeFailed, Overdue, ToolError, ToolUnavailable
from tidemill.core.outcomes import clip, plain
from tidemill.core.reply import Fault, ToolResult
from tidemill.tools.argument_check import arguments_of, arguments_problem
from tidemill.tools.function_tool import Tool, as_tool
from tidemill.tools.limited_call import OwnThread, Places, limited_call

UNKNOWN = "(unknown)"  # the name under which calls of unknown tools are counted
KINDS: dict[Fault, str] = {"": "", "malformed": "malformed", "error": "errors", "late": "late"}  # counts by fault
_NAME = 64  # characters of a name that the model wrote


@dataclass(slots=True)
class ToolCounts:
    """The calls of one tool so far."""

    calls: int = 0
    malformed: int = 0  # calls that could not be read, or had wrong arguments
    errors: int = 0  # calls in which the tool raised an exception
    late: int = 0  # calls that did not end within their limit
    unavailable: int = 0  # calls in which the tool could not work for a cause outside the policy
    seconds: float = 0.0  # of all calls together

    def add(self, kind: str, seconds: float) -> None:
        """Count a call, here and in the episode's counts. kind: the count besides that it raises; "" if none."""
        self.calls += 1
        self.seconds += seconds
        if kind:
            setattr(self, kind, getattr(self, kind) + 1)
        counted("tools/calls", *([f"tools/{kind}"] if kind else []))


class ToolSet:
    """Tools by name: their schemas for the policy, and `call` for what it makes of them."""

    def __init__(
        self,
        tools: Sequence[Any],
        *,
        limit_s: float = 30.0,
        most_output: int = 16_384,
        as_text: Callable[[Any], str] | None = None,
        thread: OwnThread | None = None,
    ) -> None:
        """tools: functions, methods, `Tool`s, or objects with `schema`. limit_s: seconds that a call may take.

        most_output: characters of a result that the policy is shown. as_text: turns a result into text; by default a text
        stays as it is, and anything else becomes JSON. thread: makes all blocking calls; a late one is in the way of all
        others, so it raises ToolUnavailable. Raises ConfigError for what is no tool, and for a name that two have.
        """
        if not limit_s > 0 or most_output < 1:
            raise ConfigError(f"ToolSet(limit_s={limit_s!r}, most_output={most_output!r}): expected numbers above 0")
        found = [as_tool(each) for each in tools]
        self.tools = {each.name: each for each in found}
        if len(self.tools) < len(found):
            names = [each.name for each in found]
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"two tools have the name {twice!r}: give one another name with @tool(name=...)")
        self._limit_s, self._most, self._as_text, self._thread = limit_s, most_output, as_text or text_of_result, thread
        self._places = {id(each.owner): Places(1) for each in found if each.owner is not None}
        self.counts: dict[str, ToolCounts] = {}  # by tool; calls of unknown ones under UNKNOWN

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Descriptions of the tools, as chat completions take them as `tools`."""
        return [each.schema for each in self.tools.values()]

    async def call(self, tool_call: Any) -> dict[str, Any]:
        """Run one call, as it stands in a message's `tool_calls`, and return the message with its result."""
        return (await self.result(tool_call)).message

    async def results(self, tool_calls: Sequence[Any]) -> list[ToolResult]:
        """Run calls side by side; the results are in the order of the calls."""
        found = await asyncio.gather(*map(self.result, tool_calls), return_exceptions=True)
        for each in found:
            if isinstance(each, BaseException):
                raise each
        return [each for each in found if isinstance(each, ToolResult)]

    async def result(self, tool_call: Any) -> ToolResult:
        """Run one call. Raises ToolUnavailable, and nothing else."""
        begin = time.monotonic()
        function = tool_call.get("function") if isinstance(tool_call, Mapping) else None
        function = function if isinstance(function, Mapping) else {}
        name, call_id = function.get("name"), tool_call.get("id") if isinstance(tool_call, Mapping) else None
        own = self.tools.get(name) if isinstance(name, str) else None
        counts = self.counts.setdefault(own.name if own else UNKNOWN, ToolCounts())
        try:
            content, fault = await self._ran(own, name, function.get("arguments"))
        except ToolUnavailable:
            counts.add("unavailable", time.monotonic() - begin)
            raise
        seconds = time.monotonic() - begin
        counts.add(KINDS[fault], seconds)
        shown = clip(name, _NAME) if isinstance(name, str) else ""
        return ToolResult(shown, content, call_id if isinstance(call_id, str) else "", fault, seconds)

    async def _ran(self, own: Tool | None, name: Any, given: Any) -> tuple[str, Fault]:
        """The text of one call's result, and what was wrong with the call."""
        if own is None:
            if not isinstance(name, str):
                return "error: the call names no tool", "malformed"
            known = ", ".join(self.tools) or "none, because there are no tools"
            return f"error: there is no tool {clip(name, _NAME)!r}: expected {known}", "malformed"
        try:
            arguments = arguments_of(given)
            problem = arguments_problem(arguments, own.schema["function"]["parameters"], closed=own.closed)
        except (ValueError, RecursionError) as error:
            problem, arguments = str(error), {}
        if problem:
            return f"error: {own.name}: {problem}", "malformed"
        limit_s, place = own.limit_s or self._limit_s, self._places.get(id(own.owner))
        try:
            work = partial(own.function, **own.values_of(arguments))
            value = await limited_call(work, limit_s, awaits=own.awaits, place=place, thread=self._thread)
            return self._shown(self._as_text(value)), ""
        except Overdue:
            late = f"{own.name} gave no result within {limit_s:g} s"
            if self._thread is not None:
                raise ToolUnavailable(f"tool {late}") from None
            return f"error: {late}", "late"
        except ToolUnavailable:
            raise
        except EpisodeFailed as failed:  # such as a fault of the sandbox, after which nothing is known of the call
            raise ToolUnavailable(f"{own.name}: {failed}") from failed
        except ToolError as failed:
            return f"error: {own.name}: {clip(str(failed), self._most)}", failed.fault
        except Exception as error:  # a user's tool may raise anything
            return f"error: {own.name} raised {_described(error)}", "error"

    def _shown(self, text: str) -> str:
        """A result that is not too long, and holds no half characters."""
        if len(text) <= self._most:
            return plain(text)
        return f"{plain(text[: self._most])}\n[cut after {self._most} of {len(text)} characters]"


def text_of_result(value: Any) -> str:
    """A tool's result as text: a text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_as_json)


def _as_json(value: Any) -> Any:
    """A value that JSON does not know: dataclasses, pydantic models, arrays; else its text."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    for method in ("model_dump", "tolist"):
        if callable(made := getattr(value, method, None)):
            return made()
    return list(value) if isinstance(value, set | frozenset) else str(value)


def _described(error: Exception) -> str:
    try:
        text = clip(str(error))
    except Exception:  # even its text may fail
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
