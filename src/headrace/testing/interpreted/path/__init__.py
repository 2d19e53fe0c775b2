"""The folder that is added to the Python path of a vLLM server with interpreted kernels: see :mod:`.sitecustomize`."""
