"""A process of the run on another machine: a node of a Ray cluster (ray/), or a machine that has joined (joining/).

supervisor.py    the object that starts and supervises the process, on its machine
process.py       the controller's handle of the process
"""
