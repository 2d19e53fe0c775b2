"""Engines that other programs serve: vLLM and SGLang."""
