"""The page docs/models.md: every causal architecture of the installed transformers, tried as a tiny random model."""
