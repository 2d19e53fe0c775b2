"""The launch package: it starts and supervises the processes of a run, on this machine or on a Ray cluster's nodes.

Every process of a run imports this package when it starts, so this file imports nothing.

    config.py · order.py    the settings of the launch, and the order that a session passes to a launcher
    local.py · processes.py starts, watches and ends all processes of one run
    child.py · starters.py  one process, and its starter: local_process.py on this machine, ray/ on a cluster
    channel.py              the sockets between the controller and one process
    clients/ · hosts/       the controller's end and the process's end of each conversation, one file per role;
                            clients/pool.py keeps the workers that run user code (rewards, environments), and
                            hosts/worker.py has the loop that all these workers share
"""
