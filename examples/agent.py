"""An agent with a tool, written with the plain OpenAI client. As it is, it can be trained:

    [data]
    path = "tasks.jsonl"            # rows like {"question": "What is 17 * 23?", "answer": "391"}
    [env]
    kind = "program"
    command = "python examples/agent.py"

The run starts it once for every episode. OPENAI_BASE_URL and OPENAI_API_KEY lead to the model under training,
HEADRACE_TASK names a file with the row, and the last line that it prints is what the episode earned.
"""

import json
import os
import re
from pathlib import Path

import openai

TOOL = {
    "name": "multiply",
    "description": "Multiply two whole numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}
TOOLS = [{"type": "function", "function": TOOL}]


def multiply(arguments):
    """Return the product of the two numbers in ``arguments``, a JSON text of the model, or the error as text."""
    try:
        numbers = json.loads(arguments)
        return str(int(numbers["a"]) * int(numbers["b"]))
    except (ValueError, TypeError, KeyError) as error:
        return f"error: {error!r}"  # the model reads it, and may try again


task = json.loads(Path(os.environ["HEADRACE_TASK"]).read_text())  # noqa: TID251 - a program of its own
client = openai.OpenAI()
messages = [{"role": "user", "content": task["question"]}]
for _ in range(5):
    reply = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS).choices[0].message
    messages.append(reply)
    if not reply.tool_calls:
        break
    for call in reply.tool_calls:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": multiply(call.function.arguments)})
numbers = re.findall(r"-?\d+", reply.content or "")
print(json.dumps({"reward": float(numbers[-1:] == [str(task["answer"])])}))
