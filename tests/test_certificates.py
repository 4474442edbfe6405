"""The files of TLS: what is wrong with a set, in one line, and when new files are taken over."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from cluster_link.certificates import Certificates, Files, Watch, read
from cluster_link.errors import BadCertificates
from tests.authority import Authority, Mount, Pair

CA = Authority()
GOOD = CA.issue("127.0.0.1", "peers.example")


def now() -> datetime:
    """The moment that certificates are made at."""
    return datetime.now(UTC)


def plain(folder: Path, pair: Pair = GOOD, ca: bytes = CA.pem) -> Files:
    """A set in plain files."""
    files = Files(*(str(folder / name) for name in ("ca.pem", "cert.pem", "key.pem")))
    for path, content in zip(files, (ca, pair.cert, pair.key), strict=True):
        Path(path).write_bytes(content)
    return files


def encrypted(key: bytes) -> bytes:
    """The same key behind a password."""
    private = load_pem_private_key(key, None)
    return private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"password"))


def test_a_good_set_tells_its_names_and_its_end(tmp_path: Path) -> None:
    """Names as the certificate bears them; the end with its zone; a key is in no representation."""
    found = read(plain(tmp_path), now(), "1.3")
    assert found.names == ("127.0.0.1", "peers.example") or found.names == ("peers.example", "127.0.0.1")
    assert abs(found.expires - (now() + timedelta(days=1))) < timedelta(minutes=1)
    assert "PRIVATE" not in repr(found)


def test_rsa_will_do(tmp_path: Path) -> None:
    """A key of 2048 bits is taken."""
    assert read(plain(tmp_path, CA.issue(rsa=True)), now(), "1.2").names == ("127.0.0.1",)


@pytest.mark.parametrize(
    ("which", "content", "reason"),
    [
        ("ca", None, "is missing"),
        ("cert", None, "is missing"),
        ("key", None, "is missing"),
        ("ca", b"", "has no certificate in PEM"),
        ("cert", b"\xff\x00", "has no certificate in PEM"),
        ("cert", GOOD.cert[:200], "has a certificate that is damaged"),
        ("cert", GOOD.cert.replace(b"M", b"N"), "has a certificate that is damaged"),
        ("cert", GOOD.key, "has no certificate in PEM"),
        ("key", GOOD.cert, "has no private key in PEM"),
        ("key", b"", "has no private key in PEM"),
        ("key", encrypted(GOOD.key), "is encrypted"),
        ("key", CA.issue().key, "does not match the certificate in"),
        ("ca", b" " * ((1 << 20) + 1), "has more than 1048576 bytes"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong_with_it(
    tmp_path: Path, which: str, content: bytes | None, reason: str
) -> None:
    """One line: the setting, the path, the reason."""
    files = plain(tmp_path)
    path = Path(getattr(files, which))
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    with pytest.raises(BadCertificates) as refused:
        read(files, now(), "1.3")
    assert str(refused.value).startswith(f"tls_{which}: {path}: {reason}")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "make",
    [lambda: ed25519.Ed25519PrivateKey.generate(), lambda: ec.generate_private_key(ec.SECP521R1())],
    ids=["ed25519", "p521"],
)
def test_keys_that_grpc_does_not_take_are_refused(
    tmp_path: Path, make: Callable[[], ec.EllipticCurvePrivateKey]
) -> None:
    """Kinds with which every handshake of gRPC would fail."""
    from cryptography import x509

    key = make()
    name = x509.Name([])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now()).not_valid_after(now() + timedelta(days=1))
    from cryptography.hazmat.primitives.hashes import SHA256

    cert = builder.sign(key, None if isinstance(key, ed25519.Ed25519PrivateKey) else SHA256())
    files = plain(tmp_path)
    Path(files.cert).write_bytes(cert.public_bytes(Encoding.PEM))
    Path(files.key).write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(BadCertificates, match="is of a kind that gRPC does not take"):
        read(files, now(), "1.3")


@pytest.mark.parametrize(
    ("begins", "ends", "reason"), [(-9e5, -60.0, "expired at "), (60.0, 9e5, "is not valid before ")]
)
def test_a_certificate_out_of_its_time_is_refused(tmp_path: Path, begins: float, ends: float, reason: str) -> None:
    """Before its beginning and from its end on."""
    with pytest.raises(BadCertificates, match=reason):
        read(plain(tmp_path, CA.issue(begins=begins, ends=ends)), now(), "1.3")


@pytest.mark.parametrize(
    "kind", [b"\x2a\x86\x48\xce\x3d\x03\x01\x07", b"\x2a\x86\x48\xce\x3d\x02\x01"], ids=["curve", "key"]
)
def test_a_key_of_an_unknown_kind_in_a_certificate_is_a_reason_too(tmp_path: Path, kind: bytes) -> None:
    """The object identifier of its curve, or of its kind, is one that nobody knows: one line, no exception of a
    library's."""
    der = ssl.PEM_cert_to_DER_cert(GOOD.cert.decode())
    assert kind in der
    files = plain(tmp_path)
    Path(files.cert).write_text(ssl.DER_cert_to_PEM_cert(der.replace(kind, kind[:-1] + b"\x7f")))
    with pytest.raises(BadCertificates, match=r"tls_cert: .* has a key that cannot be read"):
        read(files, now(), "1.3")


def test_the_last_moment_is_the_one_before_the_end(tmp_path: Path) -> None:
    """A certificate is good until its end, and not at it."""
    files = plain(tmp_path)
    end = read(files, now(), "1.3").expires
    read(files, end - timedelta(microseconds=1), "1.3")
    with pytest.raises(BadCertificates, match="expired"):
        read(files, end, "1.3")


def test_a_file_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    """The system's own words; a file that even root cannot read stands for one without permission."""
    files = plain(tmp_path)._replace(key="/proc/self/mem")
    with pytest.raises(BadCertificates, match="tls_key: /proc/self/mem: cannot be read: Input/output error"):
        read(files, now(), "1.3")


def test_a_pipe_and_a_folder_are_no_files(tmp_path: Path) -> None:
    """Neither is waited for."""
    files = plain(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(BadCertificates, match="is no file"):
            read(files._replace(ca=str(path)), now(), "1.3")


# --- Looked at again


def watched(folder: Path) -> tuple[Mount, Watch, Certificates]:
    """A mount, and a watch that has taken its first set."""
    mount = Mount(folder / "tls")
    mount.write([CA], GOOD)
    files = Files(*mount.paths)
    first = read(files, now(), "1.3")
    return mount, Watch(files, first, "1.3"), first


def test_a_swapped_link_is_noticed_and_taken_at_once(tmp_path: Path) -> None:
    """As Kubernetes renews a secret: the files' own links stay, what they lead to changes."""
    mount, watch, first = watched(tmp_path)
    assert [watch.look(now()) for _ in range(3)] == [None] * 3
    mount.write([CA], CA.issue())
    found = watch.look(now())
    assert found is not None
    assert found != first
    assert watch.current is found
    assert watch.look(now()) is None


def test_what_changed_before_the_first_look_is_found(tmp_path: Path) -> None:
    """Between the reading at the start and the first look nothing is lost."""
    mount = Mount(tmp_path / "tls")
    mount.write([CA], GOOD)
    files = Files(*mount.paths)
    first = read(files, now(), "1.3")
    mount.write([CA], CA.issue())
    assert Watch(files, first, "1.3").look(now()) is not None


def test_the_same_content_anew_is_no_news(tmp_path: Path) -> None:
    """A renewal that renewed nothing disturbs no link."""
    mount, watch, _ = watched(tmp_path)
    mount.write([CA], GOOD)
    assert watch.look(now()) is None


def test_a_file_of_the_same_size_written_over_is_noticed(tmp_path: Path) -> None:
    """In place, without a link."""
    files = plain(tmp_path)
    watch = Watch(files, read(files, now(), "1.3"), "1.3")
    watch.look(now())
    other = CA.issue()
    Path(files.cert).write_bytes(other.cert)
    Path(files.key).write_bytes(other.key)
    assert watch.look(now()) is not None


def test_a_writer_half_way_is_waited_for(tmp_path: Path) -> None:
    """The certificate first, its key before the next look: no complaint, and then the new set."""
    files = plain(tmp_path)
    watch = Watch(files, read(files, now(), "1.3"), "1.3")
    watch.look(now())
    other = CA.issue()
    Path(files.cert).write_bytes(other.cert)
    assert watch.look(now()) is None
    Path(files.key).write_bytes(other.key)
    assert watch.look(now()) is not None


def test_a_bad_set_is_told_once_and_the_old_one_kept(tmp_path: Path) -> None:
    """At the second look that finds it so; another bad one is told again; a good one is taken, the first one too."""
    mount, watch, first = watched(tmp_path)
    for _ in range(2):
        mount.write([CA], CA.issue(ends=-60.0))
        assert watch.look(now()) is None
        with pytest.raises(BadCertificates, match="expired"):
            watch.look(now())
        assert [watch.look(now()) for _ in range(3)] == [None] * 3
        assert watch.current is first
    mount.write([CA], GOOD)
    assert watch.look(now()) is None
    assert watch.current is first


def test_a_set_that_is_not_valid_yet_is_taken_when_it_is(tmp_path: Path) -> None:
    """Told once, and taken at its moment without another change of the files."""
    mount, watch, _ = watched(tmp_path)
    mount.write([CA], CA.issue(begins=60.0))
    assert watch.look(now()) is None
    with pytest.raises(BadCertificates, match="is not valid before"):
        watch.look(now())
    assert watch.look(now()) is None
    assert watch.look(now() + timedelta(seconds=90)) is not None


def test_files_that_are_gone_are_told_once(tmp_path: Path) -> None:
    """A mount that was taken away leaves the old set in force."""
    mount, watch, first = watched(tmp_path)
    watch.look(now())
    (mount.folder / "..data").unlink()
    assert watch.look(now()) is None
    with pytest.raises(BadCertificates, match="is missing"):
        watch.look(now())
    assert watch.look(now()) is None
    assert watch.current is first
