"""The local drivers. ``driver.py`` is a part of Headrace; the other modules are programs of the standard library alone,
which start in milliseconds."""
