"""The World (kube_world) of a real kube-apiserver: pods are written by hand, slices come from the real controller.

Decides how what a test asks for is had without a scheduler and a kubelet: a pod is bound to its node by whoever makes
it, and its status is written too.  Needs what `make kube` builds.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests import kube_build
from tests.daemons import wait_until
from tests.kube_plane import STRATEGIC, ControlPlane, Refused
from tests.kube_world import PEER_LABEL, PORT_NAME

HOME = "sidegate-tests"
"""The namespace of the account that the worlds' users are, and of the pod by which the controllers are watched."""
_LONG = 3600
"""Seconds that nothing here lasts."""
_RBAC = "rbac.authorization.k8s.io"


def built(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of the real programs; skips the test where there are none."""
    kept = kube_build.folder(environ)
    if not kube_build.is_built(kept):
        pytest.skip(f"NO REAL API SERVER: kube-apiserver {kube_build.version()} is not built; `make kube` builds it")
    return kept


class RealWorld:
    """See World.  slice_size: endpoints in one slice at most."""

    def __init__(self, programs: Path, slice_size: int = 100) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="sg-kube-"))
        self.plane = ControlPlane(self._folder, programs, slice_size)
        self.kubeconfig = self._folder / "peers.kubeconfig"
        self.namespace = ""
        self._numbers = count(1)
        try:
            self.plane.start()
            self._home = _Namespace(self.plane, HOME)
            self._furnish()
            self.renew()
        except BaseException:
            self.close()
            raise

    def renew(self) -> None:
        self.resume()
        self.start()
        self.namespace = f"ring-{next(self._numbers)}"
        self._here = _Namespace(self.plane, self.namespace)
        rule = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
        self._here.create("roles", {"metadata": {"name": "peers"}, "rules": [rule]}, _RBAC)
        self.allow(True)

    def host(self, number: int) -> str:
        """The address from which this machine would speak to others; no datagram is sent to learn it."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(("203.0.113.1", 9))
            except OSError:
                pytest.skip("this machine has no address that a real API server takes into a slice")
            return str(probe.getsockname()[0])

    def add_service(self, name: str, publish_not_ready: bool = True, dual: bool = False) -> None:
        self._here.add_service(name, publish_not_ready, dual)

    def add_pod(
        self, name: str, ip: str, node: str, ready: bool = True, ips: Sequence[str] = (), port: int = 1051
    ) -> str:
        return self._here.add_pod(name, ips or (ip,), node, ready, port)

    def make_ready(self, name: str, ready: bool) -> None:
        self._here.make_ready(name, ready)

    def delete_pod(self, name: str) -> None:
        # A kubelet would end it after this long; there is none.
        self.plane.delete(self._here.path("pods", name), gracePeriodSeconds=_LONG)

    def finish_pod(self, name: str) -> None:
        self.plane.delete(self._here.path("pods", name), gracePeriodSeconds=0)

    def pause(self) -> None:
        self.plane.api.pause()

    def resume(self) -> None:
        if self.plane.api.runs:
            self.plane.api.resume()
            self.await_controllers()

    def kill(self) -> None:
        self.plane.api.end()

    def start(self) -> None:
        if not self.plane.api.runs:
            # Having failed for a while, the controllers would try again after up to half a minute.
            self.plane.controllers.end()
            self.plane.start()
            self.await_controllers()

    def compact(self) -> None:
        self.kill()
        self.plane.forget_history()
        self.start()

    def close(self) -> None:
        self.plane.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def allow(self, allowed: bool) -> None:
        """Whether the kubeconfig's user may read the EndpointSlices of the present namespace."""
        if allowed:
            body = {
                "metadata": {"name": "peers"},
                "roleRef": {"apiGroup": _RBAC, "kind": "Role", "name": "peers"},
                "subjects": [{"kind": "ServiceAccount", "name": "daemon", "namespace": HOME}],
            }
            self._here.create("rolebindings", body, _RBAC)
        else:
            self.plane.delete(self._here.path("rolebindings", "peers", _RBAC))

    def token(self, secret: str = "") -> str:
        """A fresh token of the kubeconfig's user.  secret: one of HOME's, with which the token ends."""
        spec: dict[str, Any] = {"expirationSeconds": _LONG}
        if secret:
            spec["boundObjectRef"] = {"kind": "Secret", "apiVersion": "v1", "name": secret}
        path = f"{self._home.path('serviceaccounts', 'daemon')}/token"
        body = {"kind": "TokenRequest", "apiVersion": "authentication.k8s.io/v1", "spec": spec}
        return str(self.plane.create(path, body)["status"]["token"])

    def _furnish(self) -> None:
        """The user, and the pod by which `await_controllers` tells."""
        self._home.create("serviceaccounts", {"metadata": {"name": "daemon"}})
        self.kubeconfig.touch(mode=0o600)
        self.kubeconfig.write_text(self.plane.kubeconfig(self.token()))
        self._home.add_service("canary", publish_not_ready=False)
        self._home.add_pod("canary", ["10.9.9.9"], "canary", ready=False)
        self.await_controllers()

    def await_controllers(self) -> None:
        """Wait until a change of a pod becomes one of its slice, as it does at once while the controllers follow."""
        for ready in (True, False):
            self._home.make_ready("canary", ready)
            wait_until(lambda ready=ready: self._home.readiness() == [ready], "the slice follows", 60.0)  # type: ignore[misc]


class _Namespace:
    """One namespace of a control plane, made by this."""

    def __init__(self, plane: ControlPlane, name: str) -> None:
        self._plane = plane
        self._name = name
        plane.create("/api/v1/namespaces", {"metadata": {"name": name}})

    def path(self, kind: str, name: str = "", group: str = "") -> str:
        """Of an object, or of a kind's collection.  group: of version v1; none is the core's."""
        whole = f"/{f'apis/{group}' if group else 'api'}/v1/namespaces/{self._name}/{kind}"
        return f"{whole}/{name}" if name else whole

    def create(self, kind: str, body: Mapping[str, Any], group: str = "") -> dict[str, Any]:
        """Make an object."""
        return self._plane.create(self.path(kind, group=group), body)

    def add_service(self, name: str, publish_not_ready: bool, dual: bool = False) -> None:
        """A headless Service over all pods with PEER_LABEL."""
        spec = {
            "clusterIP": "None",
            "selector": dict([PEER_LABEL]),
            "ports": [{"name": PORT_NAME, "port": 1051, "targetPort": PORT_NAME}],
            "publishNotReadyAddresses": publish_not_ready,
            "ipFamilyPolicy": "RequireDualStack" if dual else "SingleStack",
            "ipFamilies": ["IPv4", "IPv6"] if dual else ["IPv4"],
        }
        self.create("services", {"metadata": {"name": name}, "spec": spec})

    def add_pod(self, name: str, ips: Sequence[str], node: str, ready: bool, port: int = 1051) -> str:
        """A pod that runs on this node, which is made if there is none, and its uid."""
        try:
            self._plane.create("/api/v1/nodes", {"metadata": {"name": node}})
        except Refused as refused:
            if refused.status != 409:
                raise
        container = {"name": "sidegate", "image": "none", "ports": [{"name": PORT_NAME, "containerPort": port}]}
        spec = {"nodeName": node, "containers": [container], "terminationGracePeriodSeconds": _LONG}
        made = self.create("pods", {"metadata": {"name": name, "labels": dict([PEER_LABEL])}, "spec": spec})
        addresses = [{"ip": ip} for ip in ips]
        status = {"phase": "Running", "podIP": ips[0], "podIPs": addresses, "conditions": [_condition(ready)]}
        self._set_status(name, status)
        return str(made["metadata"]["uid"])

    def make_ready(self, name: str, ready: bool) -> None:
        """Set a pod's condition Ready."""
        self._set_status(name, {"conditions": [_condition(ready)]})

    def readiness(self) -> list[bool]:
        """What the slices say of each endpoint."""
        answer = self._plane.call("GET", self.path("endpointslices", group="discovery.k8s.io"))
        return [one["conditions"]["ready"] for piece in answer["items"] for one in piece["endpoints"] or ()]

    def _set_status(self, pod: str, status: Mapping[str, Any]) -> None:
        self._plane.call("PATCH", f"{self.path('pods', pod)}/status", {"status": status}, STRATEGIC)


def _condition(ready: bool) -> dict[str, str]:
    return {"type": "Ready", "status": "True" if ready else "False"}
