"""The items of a response, told one after the other: what was thought, what was said, what is called."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from headrace.base.types.chat import Reply
from headrace.rollout.environments.base import AnswerPiece
from headrace.wings.agents.base import Json, SseEvent


def thought_item(name: str, text: str) -> Json:
    """What was thought."""
    parts = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": parts}


def message_item(name: str, text: str, status: str, logprobs: Sequence[Json]) -> Json:
    """What was said."""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
    return {"type": "message", "id": f"msg_{name}", "role": "assistant", "status": status, "content": [part]}


class ItemTelling:
    """The events of one response."""

    def __init__(self, *, name: str, begun: Json, whole: Callable[[Sequence[Reply]], Json]) -> None:
        """``begun`` is the response of which nothing has been said, ``whole`` that of its replies; its items are called
        ``name``."""
        self._name, self._begun, self._whole = name, begun, whole
        self._numbers = itertools.count()
        self._is_begun = False
        self._place = -1
        self._kind = ""
        """Of the item at that place that is not told to its end; empty where there is none."""
        self._said = ""

    def grow(self, choice: int, piece: AnswerPiece) -> Iterator[SseEvent]:
        yield from self._begin()
        for kind, text in (("reasoning", piece.reasoning), ("message", piece.content)):
            if not text:
                continue
            if self._kind != kind:
                if self._kind:
                    yield from self._close(self._item())
                yield from self._open(kind)
            self._said += text
            part = self._item()["content"][0]
            more: Json = {"logprobs": []} if "logprobs" in part else {}
            yield self._about(f"response.{part['type']}.delta", content_index=0, delta=text, **more)

    def end(self, replies: Sequence[Reply]) -> Iterator[SseEvent]:
        whole = self._whole(replies)
        yield from self._begin()
        if self._kind:
            yield from self._close(whole["output"][self._place])
        for item in whole["output"][self._place + 1 :]:
            if item["type"] == "function_call":
                yield from self._call(item)
            else:  # a message without words
                yield from self._open("message")
                yield from self._close(item)
        yield self._event(f"response.{whole['status']}", response=whole)

    def _begin(self) -> Iterator[SseEvent]:
        if not self._is_begun:
            self._is_begun = True
            yield self._event("response.created", response=self._begun)
            yield self._event("response.in_progress", response=self._begun)

    def _item(self) -> Json:
        """The open one, as far as it is told."""
        if self._kind == "reasoning":
            return thought_item(self._name, self._said)
        return message_item(self._name, self._said, "completed", [])

    def _open(self, kind: str) -> Iterator[SseEvent]:
        self._place, self._kind, self._said = self._place + 1, kind, ""
        item = self._item()
        begun = {**item, "content": []} | ({"status": "in_progress"} if "status" in item else {})
        yield self._event("response.output_item.added", output_index=self._place, item=begun)
        yield self._about("response.content_part.added", content_index=0, part=item["content"][0])

    def _close(self, item: Json) -> Iterator[SseEvent]:
        part = item["content"][0]
        more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
        yield self._about(f"response.{part['type']}.done", content_index=0, text=part["text"], **more)
        yield self._about("response.content_part.done", content_index=0, part=part)
        yield self._event("response.output_item.done", output_index=self._place, item=item)
        self._kind = ""

    def _call(self, item: Json) -> Iterator[SseEvent]:
        self._place += 1
        begun = {**item, "arguments": "", "status": "in_progress"}
        kind, about = "response.function_call_arguments", {"item_id": item["id"], "output_index": self._place}
        yield self._event("response.output_item.added", output_index=self._place, item=begun)
        yield self._event(f"{kind}.delta", **about, delta=item["arguments"])
        yield self._event(f"{kind}.done", **about, name=item["name"], arguments=item["arguments"])
        yield self._event("response.output_item.done", output_index=self._place, item=item)

    def _about(self, kind: str, **fields: Any) -> SseEvent:
        """An event of the open item."""
        return self._event(kind, item_id=self._item()["id"], output_index=self._place, **fields)

    def _event(self, kind: str, **fields: Any) -> SseEvent:
        return SseEvent(kind, {"type": kind, "sequence_number": next(self._numbers), **fields})
