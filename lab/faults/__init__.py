"""Fault injection: runs whose parts are killed at random moments, resumed, and checked against their ledgers."""
