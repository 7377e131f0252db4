"""What may be given as ``ssl=``. Knows the two contexts of a rank and their traps, not connections; loads ssl when it is needed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from ssl import SSLContext

    from asynccoll.net.tls import Tls

__all__ = ["Contexts", "layer", "tls"]

Contexts: TypeAlias = "SSLContext | tuple[SSLContext, SSLContext]"
"""The context of the side that is called and of the side that calls; one for both only if it is of ``ssl.PROTOCOL_TLS``."""

_WHAT: Final = (
    "pass ssl=asynccoll.tls(certfile, keyfile, cafile), or a pair (server_context, client_context) of ssl.SSLContext: "
    "every rank takes calls and makes calls"
)


def tls(
    certfile: str | os.PathLike[str],
    keyfile: str | os.PathLike[str] | None = None,
    cafile: str | os.PathLike[str] | None = None,
    *,
    check_hostname: bool = False,
) -> tuple[SSLContext, SSLContext]:
    """The contexts for ``init(ssl=...)``: TLS 1.3 in which both ends of every connection show a certificate of one CA.

    Args:
        certfile: this rank's certificate in PEM, with what leads to its CA. It must be good for servers and for clients.
        keyfile: its private key in PEM, unencrypted; None: in ``certfile``.
        cafile: the CA in PEM that signed every rank's certificate; None: ``certfile`` itself, one self-signed certificate for all.
        check_hostname: whoever is called must have a certificate for the host as it was called: rank 0 by the name or address that
            the ranks were given, every other rank by its numeric address. Needed if ``cafile`` signs for others than the ranks.

    Raises:
        OSError: a file cannot be read. ``ssl.SSLError`` (an OSError): it holds no certificate, or key and certificate do not match.
    """
    import ssl

    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = check_hostname
    for context in (server, client):
        context.load_cert_chain(certfile, keyfile)
        context.load_verify_locations(certfile if cafile is None else cafile)
        context.verify_mode = ssl.CERT_REQUIRED
        context.minimum_version = ssl.TLSVersion.TLSv1_3
    server.num_tickets = 0  # nobody resumes a session
    return server, client


def layer(value: Contexts | None, *, insecure: bool = False) -> Tls | None:
    """What connections begin with if ``ssl=value``.

    Raises:
        ValueError: it is neither a context nor a pair of them; a context is made for the other side; or the client side verifies
            nothing and ``insecure`` is not set.
    """
    if value is None:
        return None
    import ssl

    from asynccoll.net.tls import Tls

    pair = tuple(value) if isinstance(value, tuple | list) else (value, value)
    if len(pair) != 2 or not all(isinstance(context, ssl.SSLContext) for context in pair):
        raise ValueError(f"ssl={value!r} is not understood: {_WHAT}")
    server, client = pair
    if server is client and server.protocol is not ssl.PROTOCOL_TLS:
        side = "server" if server.protocol is ssl.PROTOCOL_TLS_SERVER else "client"
        raise ValueError(f"ssl= is a context for the {side} side alone: {_WHAT}")
    if server.protocol is ssl.PROTOCOL_TLS_CLIENT or client.protocol is ssl.PROTOCOL_TLS_SERVER:
        raise ValueError(f"the contexts in ssl= are in the wrong order, or both of one side: {_WHAT}")
    if client.verify_mode is not ssl.CERT_REQUIRED and not insecure:
        raise ValueError(
            "the client context in ssl= verifies no certificate, so whoever sits between two ranks could pass for one: set "
            "verify_mode = ssl.CERT_REQUIRED and load the CA (or pass insecure=True)"
        )
    return Tls(server, client)
