"""Machines beside this one: Ray, and machines that join a run."""
