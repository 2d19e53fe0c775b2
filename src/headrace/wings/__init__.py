"""Parts that the core does not need: each is found by its entry point, as an installed third-party package would be."""
