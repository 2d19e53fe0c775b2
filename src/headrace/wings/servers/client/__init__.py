"""Engines behind a server of somebody else's making, trained through its own API."""
