"""The three files of TLS: what is wrong with them, and when new ones take the place of those in force.

Decides whether a set may be used.  Knows no gRPC, no connection and no timer: whoever looks says when.  Reasons are
one line each, and name the file.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from cluster_link.errors import BadCertificates

VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
"""The lowest versions that can be asked for, as settings name them."""
_LONGEST = 1 << 20
_SHORTEST_RSA = 2048
_CURVES = ("secp256r1", "secp384r1")
_KINDS = f"RSA of {_SHORTEST_RSA} bits or more, ECDSA on P-256 or P-384"
_ATTEMPTS = 3


class Files(NamedTuple):
    """Paths of PEM files.  ca: who may have signed a peer's certificate; cert: this node's own, with what lies between
    it and its CA behind it; key: its private key, not encrypted."""

    ca: str
    cert: str
    key: str


@dataclass(frozen=True)
class Certificates:
    """A set that was found good.

    expires: the first moment at which the node's own certificate is valid no more.  names: who it is made out to.
    context: for servers that Python's ssl makes; it asks clients for no certificate.
    """

    ca: bytes
    cert: bytes
    key: bytes = field(repr=False)
    expires: datetime
    names: tuple[str, ...]
    context: ssl.SSLContext = field(repr=False, compare=False)


def read(files: Files, now: datetime, minimum: str) -> Certificates:
    """The set that stands in these files; raises BadCertificates.

    now: with a time zone; a certificate that is not valid at that moment is refused.  minimum: one of VERSIONS, for
    `context`.
    """
    for _ in range(_ATTEMPTS):
        ca, cert, key = found = [_content(name, path) for name, path in zip(Files._fields, files, strict=True)]
        expires, names = _check(files, ca, cert, key, now)
        context = _context(files, ca, minimum)
        # Python's ssl reads paths, not bytes: if nothing was swapped in between, it has read what was checked.
        if [_content(name, path) for name, path in zip(Files._fields, files, strict=True)] == found:
            return Certificates(ca, cert, key, expires, names, context)
    raise BadCertificates(f"tls_cert: {files.cert}: changes while it is read")


class Watch:
    """Looks at the files now and then, and tells of each change once.

    Followed through symbolic links, since Kubernetes swaps those.  What is good is taken at the first look.  What is
    bad is told at the second that finds it unchanged, as its writer may be half-way, and looked at again each time.
    """

    def __init__(self, files: Files, current: Certificates, minimum: str) -> None:
        self.files = files
        self.current = current
        self._minimum = minimum
        self._good: object = None  # they may have changed since `current` was read
        self._doubted: object = None
        self._told: object = None

    def look(self, now: datetime) -> Certificates | None:
        """A new good set, None if there is none; raises BadCertificates, once for each bad one."""
        stamp = _stamp(self.files)
        if stamp == self._good:
            return None
        try:
            found = read(self.files, now, self._minimum)
        except BadCertificates:
            doubted, self._doubted = self._doubted, stamp
            if stamp == self._told or stamp != doubted:
                return None
            self._told = stamp
            raise
        self._doubted = self._told = None
        # The stamp is older than what was read: what is written from now on is another.
        self._good = stamp
        if found == self.current:
            return None
        self.current = found
        return found


def _stamp(files: Files) -> object:
    stamps = []
    for path in files:
        try:
            found = os.stat(path)
        except (OSError, ValueError) as error:
            stamps.append((type(error).__name__,))
            continue
        stamps.append((found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_mode))  # type: ignore[arg-type]
    return (files, stamps)


def _content(name: str, path: str) -> bytes:
    try:
        if not os.path.isfile(path):  # a pipe would be waited for
            raise BadCertificates(f"tls_{name}: {path}: {'is no file' if os.path.exists(path) else 'is missing'}")
        with open(path, "rb") as file:
            content = file.read(_LONGEST + 1)
    except OSError as error:
        raise BadCertificates(f"tls_{name}: {path}: cannot be read: {error.strerror}") from None
    if len(content) > _LONGEST:
        raise BadCertificates(f"tls_{name}: {path}: has more than {_LONGEST} bytes")
    return content


def _check(files: Files, ca: bytes, cert: bytes, key: bytes, now: datetime) -> tuple[datetime, tuple[str, ...]]:
    """When the certificate ends, and its names; raises BadCertificates."""
    _certificates("ca", files.ca, ca)
    own = _certificates("cert", files.cert, cert)[0]
    try:
        private = load_pem_private_key(key, None)
    except TypeError:
        raise BadCertificates(
            f"tls_key: {files.key}: is encrypted; a daemon has nobody to ask for its password"
        ) from None
    except Exception:  # by what it tripped over: ValueError, UnsupportedAlgorithm
        raise BadCertificates(f"tls_key: {files.key}: has no private key in PEM") from None
    public = private.public_key()
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    try:
        certified = own.public_key().public_bytes(*form)
    except Exception:  # ValueError, UnsupportedAlgorithm
        raise BadCertificates(f"tls_cert: {files.cert}: has a key that cannot be read") from None
    if public.public_bytes(*form) != certified:
        raise BadCertificates(f"tls_key: {files.key}: does not match the certificate in {files.cert}")
    usable = (isinstance(public, rsa.RSAPublicKey) and public.key_size >= _SHORTEST_RSA) or (
        isinstance(public, ec.EllipticCurvePublicKey) and public.curve.name in _CURVES
    )
    if not usable:
        raise BadCertificates(f"tls_key: {files.key}: is of a kind that gRPC does not take; it takes {_KINDS}")
    if now >= own.not_valid_after_utc:
        raise BadCertificates(f"tls_cert: {files.cert}: expired at {own.not_valid_after_utc.isoformat()}")
    if now < own.not_valid_before_utc:
        raise BadCertificates(f"tls_cert: {files.cert}: is not valid before {own.not_valid_before_utc.isoformat()}")
    return own.not_valid_after_utc, _names(own)


def _certificates(name: str, path: str, content: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(content)
    except Exception:  # mostly ValueError; each release knows more kinds
        found = b"BEGIN CERTIFICATE" in content
        told = "has a certificate that is damaged" if found else "has no certificate in PEM"
        raise BadCertificates(f"tls_{name}: {path}: {told}") from None


def _names(own: x509.Certificate) -> tuple[str, ...]:
    try:
        found = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except Exception:  # there are none, or they cannot be read: peers that need them will say so
        return ()
    return tuple(str(name.value) for name in found)


def _context(files: Files, ca: bytes, minimum: str) -> ssl.SSLContext:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=ca.decode("ascii", "replace"))
    except (OSError, ValueError) as error:
        raise BadCertificates(f"tls_ca: {files.ca}: OpenSSL does not take it: {error}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = VERSIONS[minimum]
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(files.cert, files.key, password=lambda: "")
    except OSError as error:  # ssl.SSLError is one
        raise BadCertificates(f"tls_cert: {files.cert}: OpenSSL does not take it: {error}") from None
    return context
