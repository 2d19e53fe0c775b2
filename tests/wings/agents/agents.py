"""The same agent in every protocol, with the real clients: it asks, calls the tool that the policy calls, continues."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai

from headrace.wings.agents import Access
from tests.wings.agents.harness import ADD

QUESTIONS = ("2+3", "40+2")
SYSTEM = "Be brief."
FUNCTION = {"name": ADD.name, "description": ADD.description, "parameters": dict(ADD.parameters)}


class Clients:
    """Clients of many sessions, over one pool of connections each."""

    def __init__(self) -> None:
        nobody = Access(base_url="http://nowhere", api_key="none")
        self._oai, self._claude = oai(nobody), claude(nobody)

    def oai(self, access: Access) -> openai.AsyncOpenAI:
        return self._oai.with_options(base_url=f"{access.base_url}/v1", api_key=access.api_key)

    def claude(self, access: Access) -> anthropic.AsyncAnthropic:
        return self._claude.with_options(base_url=access.base_url, api_key=access.api_key)

    async def close(self) -> None:
        await self._oai.close()
        await self._claude.close()


def oai(access: Access) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{access.base_url}/v1", api_key=access.api_key, max_retries=0, timeout=30)


def claude(access: Access) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=access.base_url, api_key=access.api_key, max_retries=0, timeout=30)


def answer(arguments: Any) -> str:
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    return str(given["a"] + given["b"])


async def chat(access: Access, *, stream: bool, told: list[Any]) -> None:
    said: list[Any] = [{"role": "system", "content": SYSTEM}]
    asked: dict[str, Any] = {"model": "any", "messages": said, "tools": [{"type": "function", "function": FUNCTION}]}
    asked["extra_body"] = {"return_token_ids": True}
    async with oai(access) as client:
        for question in QUESTIONS:
            said.append({"role": "user", "content": question})
            while calls := await _chat(client, asked, stream, told):
                said += [
                    {"role": "tool", "tool_call_id": call.id, "content": answer(call.function.arguments)}
                    for call in calls
                ]


async def _chat(client: openai.AsyncOpenAI, asked: Any, stream: bool, told: list[Any]) -> list[Any]:
    """One answer; the calls in it."""
    if stream:
        async with client.chat.completions.stream(**asked) as events:
            completion: Any = await events.get_final_completion()
    else:
        completion = await client.chat.completions.create(**asked)
    (choice,) = completion.choices
    told.append(choice)
    asked["messages"].append(choice.message)
    return choice.message.tool_calls or []


async def responses(access: Access, *, stream: bool, told: list[Any], chained: bool = False) -> None:
    items: list[Any] = []
    asked: dict[str, Any] = {"model": "any", "instructions": SYSTEM, "input": items}
    asked["tools"] = [{"type": "function", "strict": True, **FUNCTION}]
    async with oai(access) as client:
        for question in QUESTIONS:
            items.append({"role": "user", "content": question})
            while calls := await _response(client, asked, stream, chained, told):
                items += [
                    {"type": "function_call_output", "call_id": call.call_id, "output": answer(call.arguments)}
                    for call in calls
                ]


async def _response(client: openai.AsyncOpenAI, asked: Any, stream: bool, chained: bool, told: list[Any]) -> list[Any]:
    """One answer; the calls in it."""
    if stream:
        async with client.responses.stream(**asked) as events:
            response: Any = await events.get_final_response()
    else:
        response = await client.responses.create(**asked)
    told.append(response)
    if chained:
        asked["input"].clear()
        asked["previous_response_id"] = response.id
    else:
        asked["input"] += response.output
    return [item for item in response.output if item.type == "function_call"]


async def messages(access: Access, *, stream: bool, told: list[Any]) -> None:
    said: list[Any] = []
    tool = {"name": ADD.name, "description": ADD.description, "input_schema": dict(ADD.parameters)}
    asked: dict[str, Any] = {"model": "any", "system": SYSTEM, "messages": said, "tools": [tool], "max_tokens": 4096}
    async with claude(access) as client:
        for question in QUESTIONS:
            said.append({"role": "user", "content": question})
            while calls := await _message(client, asked, stream, told):
                results = [
                    {"type": "tool_result", "tool_use_id": call.id, "content": answer(call.input)} for call in calls
                ]
                said.append({"role": "user", "content": results})


async def _message(client: anthropic.AsyncAnthropic, asked: Any, stream: bool, told: list[Any]) -> list[Any]:
    """One answer; the calls in it."""
    if stream:
        async with client.messages.stream(**asked) as events:
            message: Any = await events.get_final_message()
    else:
        message = await client.messages.create(**asked)
    told.append(message)
    asked["messages"].append({"role": "assistant", "content": message.content})
    return [block for block in message.content if block.type == "tool_use"]
