"""Goes on the path of a process with a claimed device: see :mod:`.sitecustomize`."""
