"""Why a TLS handshake failed, in an operator's words.

Decides which of them says what.  Knows no connection: it is handed the words of gRPC and of the library below it, which
are no interface and may change with a release; the tests make every one of these faults on real connections.
"""

from __future__ import annotations

_OLD = "it speaks no version of TLS that tls_min_version allows"
_PLAIN = "it does not speak TLS"
_NOT_OURS = "it does not accept our certificate"
_HUNG_UP = "it ended the connection unasked; if it is our certificate that it refuses, its log tells why (tls_refused)"
_REASONS = (
    ("Hostname Verification Check failed", "its certificate does not bear the name it is dialled by"),
    ("certificate has expired", "its certificate has expired"),
    ("certificate is not yet valid", "its certificate is not valid yet"),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is signed by no CA in tls_ca"),
    ("PEER_DID_NOT_RETURN_A_CERTIFICATE", "it showed no certificate"),
    ("WRONG_VERSION_NUMBER", _PLAIN),
    ("HTTP_REQUEST", _PLAIN),
    ("UNSUPPORTED_PROTOCOL", _OLD),
    ("NO_SHARED_CIPHER", _OLD),
    ("SSLV3_ALERT_HANDSHAKE_FAILURE", _OLD),
    ("ALERT_PROTOCOL_VERSION", _OLD),
    ("ALERT_UNKNOWN_CA", "it knows no CA that signed our certificate"),
    ("ALERT_CERTIFICATE_EXPIRED", "it finds our certificate expired"),
    ("ALERT_BAD_CERTIFICATE", _NOT_OURS),
    ("ALERT_CERTIFICATE_UNKNOWN", _NOT_OURS),
    ("Secure read failed", _HUNG_UP),
    ("Handshake read failed", _HUNG_UP),
)


def explain(text: str, ca: str = "tls_ca") -> str:
    """What gRPC, BoringSSL or OpenSSL says of a failed handshake, in an operator's words; "" if it says no such thing.

    ca: the setting that names the CAs.
    """
    return next((reason.replace("tls_ca", ca) for sign, reason in _REASONS if sign in text), "")
