"""Processes on the nodes of a Ray cluster, each kept by an actor (far/keeper.py).

fit.py        what a run on a cluster cannot be, refused when its file is read
cluster.py    the only file that imports Ray: nodes, room, actors, their ends
starter.py    which process on which part of the room
"""
