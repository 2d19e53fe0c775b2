"""Machines that join a run by themselves, with workers for its environments.

invitation.py  what such a machine has to know: a file in the run's directory
door.py        where they come in, and what becomes of them: the run's side
guest.py       one of them, as the run sees it
node.py        the program ``headrace join``: their side
relay.py       where neither reaches the other: what is between them, carried over a Redis server
streams.py     one connection over its streams
files.py       how many files may be open
"""
