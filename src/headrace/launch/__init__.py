"""Where the parts of a run live: processes of this machine, or of the nodes of a Ray cluster; supervised.

Every process of a run imports from here when it starts, so this file imports nothing.

    config.py · order.py    what is asked for
    local.py · processes.py the parts of one run, started and watched
    child.py · starters.py  one process, and who starts it: here.py on this machine, ray/ on a cluster
    clients/ · hosts/       both ends of every conversation, one file per role
"""
