"""Goes on the path of a server: see :mod:`.sitecustomize`."""
