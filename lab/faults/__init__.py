"""Runs whose parts are killed at random moments, resumed, and held against their books."""
