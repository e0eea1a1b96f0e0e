"""What the lying servers say before they lie."""

OPENS = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "liar", "version": "1"}}
TOOL = {"name": "lie", "description": "Lie.", "inputSchema": {"type": "object", "properties": {}}}
