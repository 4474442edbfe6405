"""A Kubernetes API server with pods, as the tests of discovery ask for it: what a test may have happen there.

Two keep this: our own server (kube_server.py), and a real kube-apiserver with the real endpointslice controller.
Knows neither, nor any daemon.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

PORT_NAME = "grpc"
"""The name of every Service's port and of every pod's; the Service's targetPort is this name, so that each pod says its
own number."""
PEER_LABEL = ("sidegate.dev/peer", "true")
"""What every pod bears and every Service selects."""


class World(Protocol):
    """One API server.  Every call returns when the server has taken it over; EndpointSlices follow within a second.

    kubeconfig: a file that holds where the server is, its CA and a token which may list and watch EndpointSlices in
    every namespace of this world, and nothing else.
    namespace: the one that all calls below act in.
    """

    kubeconfig: Path
    namespace: str

    def renew(self) -> None:
        """Begin another namespace, in which there is nothing; whatever was paused or killed runs again."""

    def host(self, number: int) -> str:
        """An address of this machine where a daemon can listen, and which a pod may bear here.

        number: 0..9.  A real server takes no loopback address into a slice, so its world may give the same address
        for every number; tests give each daemon a port of its own.
        """

    def add_service(self, name: str, publish_not_ready: bool = True, dual: bool = False) -> None:
        """A headless Service over all pods of the namespace.  dual: IPv4 and IPv6, else IPv4 alone."""

    def add_pod(
        self, name: str, ip: str, node: str, ready: bool = True, ips: Sequence[str] = (), port: int = 1051
    ) -> str:
        """A pod that runs on this node, and its uid.  ips: all its addresses, where it has more than `ip`.
        port: the number of its port PORT_NAME."""

    def make_ready(self, name: str, ready: bool) -> None:
        """From now on the pod is Ready, or is not."""

    def delete_pod(self, name: str) -> None:
        """Begin to end the pod: it is terminating, and still there."""

    def finish_pod(self, name: str) -> None:
        """The pod is gone, whether it was terminating or not."""

    def pause(self) -> None:
        """The server takes connections and answers nothing any more (SIGSTOP); open watches stay open, silent."""

    def resume(self) -> None:
        """It goes on (SIGCONT); what happened meanwhile is told."""

    def kill(self) -> None:
        """The server dies (SIGKILL): connections are cut, new ones refused."""

    def start(self) -> None:
        """It is there again, at the same address, with all it had stored.  Does nothing while it runs."""

    def compact(self) -> None:
        """From now on a watch from any version seen before is answered with 410; it may restart the server for it."""

    def close(self) -> None:
        """End everything."""
