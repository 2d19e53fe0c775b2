"""Machines that join a run and offer workers for its environments.

invitation.py  the file in the run's directory with which a machine joins
door.py        the run's listener for machines that join, and the life of each machine
guest.py       a machine that has joined, as the run sees it, and the processes started there
node.py        the program ``headrace join`` on that machine
relay.py       both ends of the connections over a Redis server, where the machines cannot reach each other
streams.py     one connection as two streams of a Redis server
"""
