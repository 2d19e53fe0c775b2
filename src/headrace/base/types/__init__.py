"""Records of data only: no I/O, no torch, no configuration. Every other package may import them."""
