"""Fuzzing: modified inputs of every wire format and endpoint."""
