"""Tidemill: asynchronous reinforcement-learning post-training for language models."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidemill.core.chat_interface import Chat
    from tidemill.core.errors import ToolError, ToolUnavailable
    from tidemill.core.types import InfraError, Score, Task, Unscorable
    from tidemill.envs.environment import environment
    from tidemill.envs.trl_environment import trl_environment
    from tidemill.run.api import Run, train
    from tidemill.tools.function_tool import tool
    from tidemill.tools.mcp_server import McpServer
    from tidemill.tools.tool_set import ToolSet

__version__ = "0.2.0"  # the one place: the package's metadata is made from it

__all__ = [
    "Chat",
    "InfraError",
    "McpServer",
    "Run",
    "Score",
    "Task",
    "ToolError",
    "ToolSet",
    "ToolUnavailable",
    "Unscorable",
    "environment",
    "tool",
    "train",
    "trl_environment",
]

_HOMES = {
    "Run": "run.api",
    "train": "run.api",
    "environment": "envs.environment",
    "trl_environment": "envs.trl_environment",
    "tool": "tools.function_tool",
    "ToolError": "core.errors",
    "McpServer": "tools.mcp_server",
    "ToolSet": "tools.tool_set",
    "ToolUnavailable": "core.errors",
    "Chat": "core.chat_interface",
    "InfraError": "core.types",
    "Score": "core.types",
    "Task": "core.types",
    "Unscorable": "core.types",
}


def __getattr__(name: str) -> Any:
    """The public names, imported when they are first asked for: `import tidemill` itself loads nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'tidemill' has no attribute {name!r}")
    return getattr(import_module(f"tidemill.{_HOMES[name]}"), name)
