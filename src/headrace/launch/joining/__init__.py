"""Machines that join a run by themselves, with workers for its environments.

invitation.py  what such a machine has to know: a file in the run's directory
door.py        where they come in, and what becomes of them: the run's side
guest.py       one of them, as the run sees it
node.py        the program ``headrace join``: their side
"""
