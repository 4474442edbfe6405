"""What can go wrong with the link that an operator must act on."""

from __future__ import annotations


class BadCertificates(Exception):
    """A set of TLS files that cannot be used; the text is one line that names the setting and the file."""


class BadCredentials(Exception):
    """A file that a source of members is spoken to with cannot be used; the text is one line that names the setting and
    the file."""


class CannotListen(Exception):
    """An address cannot be bound.  setting: the name of the setting that it came from."""

    def __init__(self, setting: str, address: str, why: str) -> None:
        super().__init__(f"cannot listen on {address}: {why}; set {setting} to another address, or to off")
        self.address = address
