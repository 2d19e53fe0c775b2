"""The session endpoint: any program that speaks OpenAI's or Anthropic's protocol, as an episode.

    POST /v1/chat/completions ──▶ chat ──────┐                        ┌──▶ JSON
    POST /v1/responses ─────────▶ responses ─┼─▶ Asked ─▶ Talk ─▶ Reply ─┤
    POST /v1/messages ──────────▶ messages ──┘                        └──▶ events

Each protocol is a file of pure translation; who calls is known by the key, which finds the episode.
"""

from headrace.wings.agents.base import Access, SessionLimits
from headrace.wings.agents.serving import At, Endpoint

__all__ = ["Access", "At", "Endpoint", "SessionLimits"]
