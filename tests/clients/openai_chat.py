"""An agent by the `openai` client's chat completions: python openai_chat.py [stream]"""

import json
import sys

from openai import OpenAI

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": PARAMETERS}}]


def asked(client, messages):
    if "stream" not in sys.argv:
        return client.chat.completions.create(model="policy", messages=messages, tools=TOOLS).choices[0].message
    with client.chat.completions.stream(model="policy", messages=messages, tools=TOOLS) as stream:
        for _ in stream:
            pass
        return stream.get_final_completion().choices[0].message


client, messages = OpenAI(), [{"role": "user", "content": "17 + 25?"}]
while (message := asked(client, messages)).tool_calls:
    messages.append(message)
    for call in message.tool_calls:
        given = json.loads(call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(given["a"] + given["b"])})
print(message.content)
