"""The session endpoint: an HTTP server through which any program that uses OpenAI's or Anthropic's protocol acts in an
episode.

    POST /v1/chat/completions ──▶ chat ──────┐                                          ┌──▶ JSON
    POST /v1/responses ─────────▶ responses ─┼─▶ EndpointRequest ─▶ OpenEpisode ─▶ Reply ─┤
    POST /v1/messages ──────────▶ messages ──┘                                          └──▶ events

Each protocol is one module, which only translates requests and answers. The API key of a request identifies its
episode.
"""

from headrace.wings.agents.base import Access, SessionLimits
from headrace.wings.agents.serving import Endpoint

__all__ = ["Access", "Endpoint", "SessionLimits"]
