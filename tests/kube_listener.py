"""Discovery by Kubernetes without a daemon: what the source tells, and what becomes of its standing."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster_link.discovery.connections import Connections
from cluster_link.discovery.endpoints import Rules
from cluster_link.discovery.kubernetes import Kubernetes, Myself, connect_to
from cluster_link.discovery.reflector import Api
from cluster_link.discovery.source import Standing
from cluster_link.membership import Peer
from tests.daemons import wait_until

ME = Peer("me", "10.9.9.9:1051")
"""A daemon that no slice lists."""


class Listener:
    """A source in a loop of its own thread.  sets: what it told, in order; lines: what was reported of it.

    pod: this daemon's uid.  connect: in place of the real client.  fault: what it raised.  `close` ends it, and keeps
    how long that took.
    """

    def __init__(
        self,
        kubeconfig: Path,
        namespace: str,
        rules: Rules = Rules("grpc"),  # noqa: B008  immutable
        me: Peer = ME,
        pod: str = "",
        connect: Callable[[Connections], Api] | None = None,
    ) -> None:
        self.sets: list[frozenset[Peer]] = []
        self.lines: list[tuple[str, dict[str, Any]]] = []
        self.standing = Standing("kubernetes", time.monotonic, lambda event, **more: self.lines.append((event, more)))
        self._connect = connect or connect_to(namespace, "peers", str(kubeconfig), os.environ)
        self._rules = rules
        self._me = Myself(me, pod, frozenset({me.address}))
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self.took_to_end = 0.0
        self.fault: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._task = self._loop.create_task(self._listen())
        try:
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass
        except Exception as error:
            self.fault = error
        finally:
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    async def _listen(self) -> None:
        source = Kubernetes(self._connect, self._rules, self._me, self.standing)
        told = source.members()
        try:
            async for members in told:
                self.sets.append(members)
                self.standing.changed()
        finally:
            began = time.monotonic()
            await told.aclose()  # type: ignore[attr-defined]
            self.took_to_end = time.monotonic() - began

    @property
    def names(self) -> set[str]:
        """Who is in the set told last."""
        return {peer.name for peer in self.sets[-1]} if self.sets else set()

    def becomes(self, names: set[str], seconds: float = 5.0) -> None:
        """Wait for a set of these names."""
        try:
            wait_until(lambda: self.names == names, "the members are known", seconds)
        except AssertionError:
            assert self.names == names, (self.standing.state, self.standing.why)
            raise

    def state_becomes(self, state: str, seconds: float = 10.0) -> None:
        """Wait for the source's state."""
        wait_until(lambda: self.standing.state == state, f"the source is {state}", seconds)

    def close(self) -> None:
        """End it."""
        wait_until(lambda: self._task is not None, "the loop runs")
        if self._thread.is_alive() and self._task is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(10)
        assert not self._thread.is_alive(), "the source did not end"

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
