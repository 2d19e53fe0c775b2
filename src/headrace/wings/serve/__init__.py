"""The server of ``headrace serve``: an engine over HTTP, in the protocol of OpenAI's completions and chat completions.

    bytes ──body──▶ JSON ──schema──▶ Body ──prompts──▶ ChoiceRequest ──choices──▶ ChoicePiece ──answers─▶ JSON, events
                                                         └── LocalEngine.generate, one stream per choice

Importing this package imports nothing; :mod:`headrace.wings.serve.run` imports starlette and torch.
"""
