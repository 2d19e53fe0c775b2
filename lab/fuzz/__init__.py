"""Inputs of every wire format and endpoint, changed in every way."""
