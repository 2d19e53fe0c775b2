"""A process on another machine, which is the node of a cluster (ray/), or a machine that has joined (joining/).

supervisor.py     starts the process and watches it, on its machine
process.py    represents the process in the run
"""
