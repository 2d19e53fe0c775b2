"""SGLang: a server that samples, and takes weights through its own API."""
