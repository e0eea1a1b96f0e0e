"""LangChain's agent with a tool: python langchain_agent.py [anthropic]"""

import os
import sys

from langchain.agents import create_agent
from langchain_core.tools import tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


if "anthropic" in sys.argv:
    from langchain_anthropic import ChatAnthropic

    model = ChatAnthropic(model=os.environ["ANTHROPIC_MODEL"])
else:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=os.environ["OPENAI_MODEL"])
found = create_agent(model, tools=[add]).invoke({"messages": [{"role": "user", "content": "17 + 25?"}]})
print(found["messages"][-1].content)
