"""All that a run needs from its run file to its end: settings and their rules, sessions, observation, the program."""
