"""Processes on other machines, whoever leads to them: a cluster (ray/), or a machine that has joined (joining/).

paths.py      what a process has to find there
keeper.py     one process on its machine
process.py    that process, as the run sees it
"""
