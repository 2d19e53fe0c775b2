"""Pure data. No I/O, no torch, no configuration: every other room may import these."""
