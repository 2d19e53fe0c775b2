"""The local drivers, jail and bubblewrap. ``driver.py`` runs in Headrace's process; the other modules except
``files.py`` and ``forwards.py`` are programs that use only the standard library, so that they start in milliseconds."""
