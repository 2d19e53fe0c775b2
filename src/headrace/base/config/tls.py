"""TLS of the servers that others may reach: a certificate and its key, as PEM files."""

from __future__ import annotations

import ssl

from headrace.base.errors import ConfigError


def refuse_half(section: str, certificate: str, key: str) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` where ``section`` names one of the two files and not the
    other."""
    if bool(certificate) != bool(key):
        there, missing = ("tls_certificate", "tls_key") if certificate else ("tls_key", "tls_certificate")
        raise ConfigError(f"{section}.{there} is set, {section}.{missing} is not", remedy="give both files, or none")


def server_context(certificate: str, key: str) -> ssl.SSLContext:
    """For a server; :class:`~headrace.base.errors.ConfigError` where the files cannot be used."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key, password="")  # it would ask the terminal otherwise
    except OSError as error:
        raise ConfigError(
            f"TLS with the certificate {certificate} and the key {key}: {error.strerror or error}",
            remedy="give PEM files that belong together, the key without a password: openssl req -x509 -newkey "
            "ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 365 -subj /CN=NAME -keyout KEY -out CERTIFICATE",
        ) from None
    return context


def only(certificate: str) -> ssl.SSLContext:
    """For a client that believes this certificate, whatever address the server has, and no other.

    Raises :class:`~headrace.base.errors.ConfigError` where the file cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # who holds its key is who is meant
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        context.load_verify_locations(certificate)
    except OSError as error:
        raise ConfigError(
            f"the certificate {certificate} cannot be used: {error.strerror or error}",
            remedy="give the PEM file that the server has too",
        ) from None
    return context
