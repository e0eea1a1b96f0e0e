"""An agent by the `openai` client's responses: python openai_responses.py [stream] [stored]"""

import json
import sys

from openai import OpenAI

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
TOOLS = [{"type": "function", "name": "add", "description": "Add two numbers.", "parameters": PARAMETERS, "strict": False}]


def asked(client, **more):
    if "stream" not in sys.argv:
        return client.responses.create(model="policy", tools=TOOLS, **more)
    with client.responses.stream(model="policy", tools=TOOLS, **more) as stream:
        for _ in stream:
            pass
        return stream.get_final_response()


client, items = OpenAI(), [{"role": "user", "content": "17 + 25?"}]
response = asked(client, input=items)
while calls := [item for item in response.output if item.type == "function_call"]:
    results = []
    for call in calls:
        given = json.loads(call.arguments)
        results.append({"type": "function_call_output", "call_id": call.call_id, "output": str(given["a"] + given["b"])})
    if "stored" in sys.argv:
        response = asked(client, input=results, previous_response_id=response.id)
    else:
        items += [item.model_dump(exclude_none=True) for item in response.output] + results
        response = asked(client, input=items)
print(response.output_text)
