"""Bridges to environment libraries, one file each; :mod:`headrace.rollout.environments.bridges` defines their
interface."""
