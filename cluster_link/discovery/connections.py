"""Ending what a thread waits for: its connection is cut by another thread.

Decides nothing of what is said over it.
"""

from __future__ import annotations

import socket


class Connections:
    """The connection in use, so that another thread can cut it."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._over = False

    def made(self, made: socket.socket) -> None:
        """From now on this is the one in use."""
        self._socket = made
        if self._over:
            self.cut()

    def cut(self) -> None:
        """End it and every one that is made after it; whoever reads from it is told at once."""
        self._over = True
        if self._socket is not None:
            try:
                # The plain socket's: that of TLS would first take away what the reading thread is in the midst of.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
            except OSError:
                pass  # it had ended by itself
