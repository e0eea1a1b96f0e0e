"""An MCP server with structured results, by the SDK's lower interface: python mcp_record_server.py"""

from __future__ import annotations

from typing import Any

import anyio
from mcp import types  # pyright: ignore[reportMissingImports]
from mcp.server import Server  # pyright: ignore[reportMissingImports]
from mcp.server.stdio import stdio_server  # pyright: ignore[reportMissingImports]

CITY = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}}, "required": ["city"]}
PAGES = {None: "second", "second": "third", "third": None}


async def list_tools(context: Any, params: Any) -> Any:
    page = params.cursor if params else None
    name = {None: "weather", "second": "picture", "third": "empty"}[page]
    tool = types.Tool(name=name, description=f"The {name} of a city", input_schema=CITY)
    return types.ListToolsResult(tools=[tool], next_cursor=PAGES[page])


async def call_tool(context: Any, params: Any) -> Any:
    if params.name == "weather":
        return types.CallToolResult(content=[], structured_content={"degrees": 21.5, "city": params.arguments["city"]})
    if params.name == "picture":
        text = types.TextContent(type="text", text="It is pretty:")
        return types.CallToolResult(content=[text, types.ImageContent(type="image", data="aGk=", mime_type="image/png")])
    return types.CallToolResult(content=[types.TextContent(type="text", text="no")], is_error=True)


server = Server("Records", on_list_tools=list_tools, on_call_tool=call_tool)


async def main() -> None:
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


anyio.run(main)
