"""Mutual TLS on the link: the credentials of both its ends, from whatever certificates are in force.

Decides that a handshake uses the newest set.  Knows no file, and no request: open connections stay as they are until
their clients open new ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

if TYPE_CHECKING:
    from cluster_link.certificates import Certificates


class Tls:
    """The certificates in force.  server_name: the name that peers' certificates must bear; "": the host that they are
    dialled by."""

    def __init__(self, certificates: Certificates, server_name: str = "") -> None:
        self._certificates = certificates
        self._server_name = server_name
        self._client = self._channel_credentials()

    def use(self, certificates: Certificates, server_name: str) -> bool:
        """Use these from the next handshake on, both ways; whether they differ from those in force."""
        if (certificates, server_name) == (self._certificates, self._server_name):
            return False
        self._certificates, self._server_name = certificates, server_name
        self._client = self._channel_credentials()
        return True

    def server(self) -> grpc.ServerCredentials:
        """For one port: a client must show a certificate that the CA has signed."""
        given = self._certificates

        def newer() -> grpc.ServerCertificateConfiguration | None:
            # Called before each handshake, on a thread of gRPC's.
            nonlocal given
            now = self._certificates
            if now is given:
                return None
            given = now
            return _configuration(now)

        # Its types do not tell that None, which its manual allows, means no change.
        return grpc.dynamic_ssl_server_credentials(_configuration(given), newer, True)  # type: ignore[arg-type]

    def channel(self, address: str, options: Sequence[tuple[str, Any]]) -> grpc.aio.Channel:
        """A channel that shows this node's certificate, and dials only whom the CA has signed."""
        if self._server_name:
            options = [*options, ("grpc.ssl_target_name_override", self._server_name)]
        return grpc.aio.secure_channel(address, self._client, options=options)

    def _channel_credentials(self) -> grpc.ChannelCredentials:
        now = self._certificates
        return grpc.ssl_channel_credentials(now.ca, now.key, now.cert)


def _configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(certificates.key, certificates.cert)], certificates.ca)
