"""The HTTP server of all HTTP interfaces of the library, with authentication, error responses and limits on
connections."""
