"""What a World's user sees, asked in plain HTTP: neither Sidegate nor a Kubernetes client is in between.

Decides nothing; a client's faults are not to hide a server's.
"""

from __future__ import annotations

import http.client
import json
import ssl
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode, urlsplit

import yaml


class Seen(NamedTuple):
    """One endpoint of one slice.  port: its number, None where the slice has no ports."""

    pod: str
    address: str
    node: str
    port: int | None
    ready: bool
    serving: bool
    terminating: bool


class Reader:
    """The user of a kubeconfig with a token; each call is a connection of its own.  seconds: patience at each read."""

    def __init__(self, kubeconfig: Path, seconds: float = 10.0) -> None:
        written = yaml.safe_load(kubeconfig.read_text())
        cluster, user = written["clusters"][0]["cluster"], written["users"][0]["user"]
        self._place = urlsplit(cluster["server"])
        self._context = ssl.create_default_context(cafile=cluster["certificate-authority"])
        self._headers = {"Authorization": f"Bearer {user['token']}"}
        self._seconds = seconds

    def get(self, path: str, **query: object) -> tuple[int, dict[str, Any]]:
        """Status and answer, its text under "message" where it is no JSON (as 429 is); raises OSError for none."""
        connection, response = self._ask(path, query)
        try:
            text = response.read().decode()
            is_json = response.headers.get_content_type() == "application/json"
            return response.status, json.loads(text) if is_json else {"message": text}
        finally:
            connection.close()

    def slices(self, namespace: str, service: str = "peers") -> dict[str, Any]:
        """The list of a Service's EndpointSlices, by the newest version."""
        status, answer = self.get(slices_path(namespace), labelSelector=f"kubernetes.io/service-name={service}")
        assert status == 200, answer
        return answer

    def endpoints(self, namespace: str, service: str = "peers") -> list[Seen]:
        """Every endpoint of every slice, in order."""
        return sorted(seen for one in self.slices(namespace, service)["items"] for seen in _endpoints(one))

    def first_event(self, namespace: str, version: str) -> tuple[int, dict[str, Any]]:
        """What a watch from a version begins with: its HTTP status, and its first event or the answer that it is not
        to be; an empty one where nothing came for a second."""
        query = {"watch": "true", "resourceVersion": version, "timeoutSeconds": "1"}
        connection, response = self._ask(slices_path(namespace), query)
        try:
            text = response.read() if response.status != 200 else response.readline()
            return response.status, json.loads(text or b"{}")
        finally:
            connection.close()

    def _ask(self, path: str, query: dict[str, Any]) -> tuple[http.client.HTTPSConnection, http.client.HTTPResponse]:
        host, port = self._place.hostname or "", self._place.port
        connection = http.client.HTTPSConnection(host, port, timeout=self._seconds, context=self._context)
        try:
            connection.request("GET", f"{path}?{urlencode(query)}", headers=self._headers)
            return connection, connection.getresponse()
        except BaseException:
            connection.close()
            raise


def slices_path(namespace: str) -> str:
    """Where a namespace's EndpointSlices are."""
    return f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"


def _endpoints(one: dict[str, Any]) -> list[Seen]:
    port = next((port["port"] for port in one["ports"] or ()), None)
    return [
        Seen(
            end["targetRef"]["name"],
            end["addresses"][0],
            end["nodeName"],
            port,
            *(end["conditions"][name] for name in ("ready", "serving", "terminating")),
        )
        for end in one["endpoints"] or ()
    ]
