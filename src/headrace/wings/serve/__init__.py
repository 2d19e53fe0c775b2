"""An engine over HTTP, in the protocol of OpenAI's completions and chat completions.

    bytes ──body──▶ JSON ──schema──▶ body ──prompts──▶ Asked ──choices──▶ pieces of text ──answers──▶ JSON, or events
                                                         └── LocalEngine.generate, one stream per choice

Importing this package imports neither starlette nor torch; :mod:`headrace.wings.serve.run` does.
"""

from headrace.wings.serve.config import ServeConfig, ServeSection

__all__ = ["ServeConfig", "ServeSection"]
