"""The processes of a run on other machines: on the nodes of a Ray cluster (ray/), or on machines that have joined the
run with ``headrace join`` (joining/). What both have in common is in far/."""
