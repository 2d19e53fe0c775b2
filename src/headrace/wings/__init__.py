"""Parts that the core does without: each is found by its entry point, as a package of somebody else would be."""
