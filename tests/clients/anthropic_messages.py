"""An agent by the `anthropic` client: python anthropic_messages.py [stream]"""

import sys

from anthropic import Anthropic

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
TOOLS = [{"name": "add", "description": "Add two numbers.", "input_schema": SCHEMA}]


def asked(client, messages):
    given = {"model": "policy", "max_tokens": 200, "messages": messages, "tools": TOOLS}
    if "stream" not in sys.argv:
        return client.messages.create(**given)
    with client.messages.stream(**given) as stream:
        for _ in stream.text_stream:
            pass
        return stream.get_final_message()


client, messages = Anthropic(), [{"role": "user", "content": "17 + 25?"}]
while (message := asked(client, messages)).stop_reason == "tool_use":
    messages.append({"role": "assistant", "content": message.content})
    calls = [block for block in message.content if block.type == "tool_use"]
    results = [(call.id, str(call.input["a"] + call.input["b"])) for call in calls]
    blocks = [{"type": "tool_result", "tool_use_id": of, "content": text} for of, text in results]
    messages.append({"role": "user", "content": blocks})
print("".join(block.text for block in message.content if block.type == "text"))
