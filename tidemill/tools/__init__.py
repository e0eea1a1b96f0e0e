"""Tools that a policy calls: functions, methods, MCP servers; their schemas, limits and results."""
