"""Machines that join a run and offer workers for its environments.

invitation.py  the file in the run's directory with which a machine joins
listener.py    the run's listener for machines that join, and the life of each machine
machine.py     a machine that has joined, as the run sees it, and the processes started there
node.py        the program ``headrace join`` on that machine
"""
