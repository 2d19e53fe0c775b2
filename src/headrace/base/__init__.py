"""The lowest layer of the library: data records, errors, configuration, time, environment variables, HTTP."""

__version__ = "0.1.0"
