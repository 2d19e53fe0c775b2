"""The demo and the recipes of known systems that come with the package."""
