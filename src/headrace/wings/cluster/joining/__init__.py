"""Machines that join a run with ``headrace join`` and run workers for its environments.

invitation.py  the file in the run directory with which a machine joins
listener.py    the controller's listener for requests to join, and the admission of each machine
machine.py     the controller's representation of a joined machine, and the start of processes there
node.py        the program ``headrace join`` on that machine
"""
