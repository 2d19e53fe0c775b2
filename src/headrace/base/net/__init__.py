"""The HTTP server that all HTTP interfaces of the library run in. It closes idle connections, and the oldest ones
without a token first when it is full."""
