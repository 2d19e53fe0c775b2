"""Drivers whose sessions run elsewhere, in containers or on remote machines. A program of bash, ``server.sh``, runs the
commands."""
