"""Certificates for tests, made by a CA of the test's own, and the files that daemons read them from."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path

import trustme
from cryptography import x509

_numbers = count(1)


class Pair:
    """A certificate and its key, in PEM."""

    def __init__(self, leaf: trustme.LeafCert) -> None:
        self.key = leaf.private_key_pem.bytes()
        self.cert = b"".join(pem.bytes() for pem in leaf.cert_chain_pems)
        self.serial = serial_of(ssl.PEM_cert_to_DER_cert(leaf.cert_chain_pems[0].bytes().decode()))


class Authority:
    """A CA."""

    def __init__(self) -> None:
        self._ca = trustme.CA(organization_name=f"CA {next(_numbers)}")
        self.pem = self._ca.cert_pem.bytes()

    def issue(self, *names: str, begins: float = -3600.0, ends: float = 86_400.0, rsa: bool = False) -> Pair:
        """A certificate for these names (127.0.0.1); valid from `begins` to `ends`, in seconds from now."""
        now = datetime.now(UTC)
        kind = trustme.KeyType.RSA if rsa else trustme.KeyType.ECDSA
        begin, end = now + timedelta(seconds=begins), now + timedelta(seconds=ends)
        names = names or ("127.0.0.1",)
        return Pair(self._ca.issue_cert(*names, not_before=begin, not_after=end, key_type=kind))


class Mount:
    """A folder with ca.pem, cert.pem and key.pem that is renewed as Kubernetes renews a mounted secret: the files are
    links into a folder that is a link, and that one is swapped."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        for name in ("ca.pem", "cert.pem", "key.pem"):
            (folder / name).symlink_to(f"..data/{name}")

    def write(self, authorities: Iterable[Authority], pair: Pair) -> None:
        """All three files anew, in one moment."""
        fresh = self.folder / f"..{next(_numbers)}"
        fresh.mkdir()
        (fresh / "ca.pem").write_bytes(b"".join(authority.pem for authority in authorities))
        (fresh / "cert.pem").write_bytes(pair.cert)
        (fresh / "key.pem").write_bytes(pair.key)
        link = self.folder / "..data_tmp"
        link.symlink_to(fresh.name)
        os.rename(link, self.folder / "..data")

    @property
    def paths(self) -> tuple[str, str, str]:
        """Those of the CA, the certificate and the key."""
        return (str(self.folder / "ca.pem"), str(self.folder / "cert.pem"), str(self.folder / "key.pem"))

    @property
    def options(self) -> tuple[str, ...]:
        """As a daemon takes them."""
        return options(self.folder)


def options(folder: Path | str) -> tuple[str, ...]:
    """The options of a daemon whose files are in this folder."""
    return tuple(
        word for name in ("ca", "cert", "key") for word in (f"--tls-{name}", os.path.join(folder, f"{name}.pem"))
    )


def serial_of(der: bytes) -> int:
    """A certificate's serial number."""
    return x509.load_der_x509_certificate(der).serial_number
