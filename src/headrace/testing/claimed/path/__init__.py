"""The folder that is added to the Python path of a process with a claimed device: see :mod:`.sitecustomize`."""
