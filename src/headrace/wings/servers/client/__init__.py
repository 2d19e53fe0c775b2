"""An engine that samples through a server such as vLLM or SGLang, and updates its weights through the server's API."""
