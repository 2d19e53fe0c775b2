"""The server of ``headrace serve``, which offers an engine over HTTP in OpenAI's protocols: completions, chat
completions and responses.

    bytes ──body──▶ JSON ──schema──▶ Body ──prompts──▶ ChoiceRequest ──choices──▶ ChoicePiece ──answers─▶ JSON, events
                                                         └── LocalEngine.generate, one stream per choice

Importing this package imports nothing; :mod:`headrace.wings.serve.run` imports starlette and torch.
"""
