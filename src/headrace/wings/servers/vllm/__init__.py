"""vLLM: a server that samples, and takes weights through its weight-transfer API."""
