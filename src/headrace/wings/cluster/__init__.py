"""The processes of a run on other machines: on the nodes of a Ray cluster (ray/), or on machines that join a run
(joining/)."""
