"""Bridges to environment libraries, one file each: a bridge makes environments of the library usable in a run.
:mod:`headrace.rollout.environments.bridges` defines their interface."""
