"""The demo, and the recipes of known systems. A recipe is a set of settings with which a run makes the same choice as a
known system on every axis, such as its loss and its staleness bound."""
