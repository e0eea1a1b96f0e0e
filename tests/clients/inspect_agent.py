"""inspect-ai's ReAct agent with a tool, on a task of one sample: python inspect_agent.py

It first asks for a greeting, to see whether there is a responses API: a conversation of its own.
"""

import tempfile

from inspect_ai import Task, eval
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.tool import tool


@tool
def add():
    async def execute(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return a + b

    return execute


task = Task(dataset=[Sample(input="17 + 25?", target="42")], solver=react(tools=[add()]), scorer=includes())
with tempfile.TemporaryDirectory() as logs:
    (log,) = eval(task, model="openai/policy", display="none", log_dir=logs)
    assert log.status == "success", log.error
    print(log.samples[0].output.completion)
