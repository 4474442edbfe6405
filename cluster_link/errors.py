"""What can go wrong with the link that an operator must act on."""

from __future__ import annotations


class CannotListen(Exception):
    """The address for peers cannot be bound."""
