"""The demo, and recipes: the settings by which a run chooses on every axis what a known system chooses."""
