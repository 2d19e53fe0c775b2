"""Bridges to environment libraries, one file for each library. A bridge makes the environments of its library usable in
a run; :mod:`headrace.rollout.environments.bridges` defines the interface of bridges."""
