"""TLS in the daemon: the certificates in force, when their files are looked at, and who is told of new ones.

Decides that new files which cannot be used leave the old in force, with one line that tells why.  Loaded only where
TLS is on.  What a good set is stands in cluster_link/certificates.py; how gRPC uses it, in cluster_link/tls.py.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from cluster_link.certificates import VERSIONS, Certificates, Files, Watch, read
from cluster_link.errors import BadCertificates
from sidecar.config import Config, ConfigError


class Secure:
    """The certificates in force.  Raises BadCertificates if those of the start cannot be used.

    now: a clock, with a time zone.
    """

    def __init__(self, config: Config, log: Any, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._log = log
        self._now = now
        self._minimum = config.tls_min_version
        files = _files(config)
        self._name = config.tls_server_name
        self._users: list[Callable[[Certificates, str], None]] = []
        self._expired: Certificates | None = None
        found = read(files, now(), self._minimum)
        self._watch = Watch(files, found, self._minimum)
        log.info("tls_on", **_told(found), min_version=self._minimum)

    @property
    def certificates(self) -> Certificates:
        """Those in force."""
        return self._watch.current

    def tell(self, user: Callable[[Certificates, str], None]) -> None:
        """Call this with each new set, and the name that peers' certificates must bear."""
        self._users.append(user)

    def http(self) -> ssl.SSLContext:
        """For a port: each handshake is given what is in force by then."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = VERSIONS[self._minimum]

        def newest(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            connection.context = self.certificates.context

        context.sni_callback = newest  # called whether or not a client names a server
        return context

    async def look(self) -> None:
        """Take over what has changed in the files."""
        watch = self._watch
        try:
            # Off the loop: a file on a slow disk must not keep clients waiting.
            found = await asyncio.to_thread(watch.look, self._now())
        except BadCertificates as error:
            self._log.warning("tls_not_renewed", reason=str(error), expires=self.certificates.expires.isoformat())
            return
        if found is not None and watch is self._watch:
            self._log.info("tls_renewed", **_told(found))
            self._tell()
        if self._now() >= self.certificates.expires and self._expired is not self.certificates:
            self._expired = self.certificates
            self._log.warning("tls_expired", **_told(self.certificates))

    async def prepare(self, config: Config) -> Callable[[], None] | None:
        """A reading of the settings: the files anew, at once, and perhaps others.  See Reload."""
        if not config.tls_ca:
            return None
        files, name = _files(config), config.tls_server_name
        try:
            found = await asyncio.to_thread(read, files, self._now(), self._minimum)
        except BadCertificates as error:
            raise ConfigError(str(error)) from None

        def change() -> None:
            renewed = found != self.certificates
            if (files, found, name) == (self._watch.files, self.certificates, self._name):
                return
            self._watch = Watch(files, found, self._minimum)
            self._name = name
            if renewed:
                self._log.info("tls_renewed", **_told(found))
            self._tell()

        return change

    def _tell(self) -> None:
        for user in self._users:
            user(self.certificates, self._name)


def _files(config: Config) -> Files:
    return Files(config.tls_ca, config.tls_cert, config.tls_key)


def _told(found: Certificates) -> dict[str, object]:
    return {"names": list(found.names), "expires": found.expires.isoformat()}
