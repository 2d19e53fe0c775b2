"""A run from its file to its end: settings and their rules, sessions, observation, the program."""
