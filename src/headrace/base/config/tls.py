"""TLS for servers that other machines can reach: a certificate and its key, as PEM files."""

from __future__ import annotations

import ssl

from headrace.base.errors import ConfigError


def refuse_incomplete_tls(section: str, certificate: str, key: str) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` if the settings of ``section`` contain only one of the paths
    ``certificate`` and ``key`` of two PEM files. An empty path means that the file is not set."""
    if bool(certificate) != bool(key):
        present, missing = ("tls_certificate", "tls_key") if certificate else ("tls_key", "tls_certificate")
        raise ConfigError(f"{section}.{present} is set, {section}.{missing} is not", remedy="give both files, or none")


def server_context(certificate: str, key: str) -> ssl.SSLContext:
    """Return the TLS context of a server. ``certificate`` and ``key`` are the paths of PEM files. Raises
    :class:`~headrace.base.errors.ConfigError` if the files cannot be used."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key, password="")  # a password of "" prevents a prompt
    except OSError as error:
        raise ConfigError(
            f"TLS with the certificate {certificate} and the key {key}: {error.strerror or error}",
            remedy="give PEM files that belong together, the key without a password: openssl req -x509 -newkey "
            "ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 365 -subj /CN=NAME -keyout KEY -out CERTIFICATE",
        ) from None
    return context


def client_context(certificate: str) -> ssl.SSLContext:
    """Return the TLS context of a client that trusts only the certificate in the PEM file ``certificate``, whatever the
    address of the server.

    Raises :class:`~headrace.base.errors.ConfigError` if the file cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the certificate itself identifies the server, not its name
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        context.load_verify_locations(certificate)
    except OSError as error:
        raise ConfigError(
            f"the certificate {certificate} cannot be used: {error.strerror or error}",
            remedy="give the PEM file that the server has too",
        ) from None
    return context
