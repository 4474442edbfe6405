"""An API server of our own: the EndpointSlices of pods that a test makes, listed and watched over HTTPS, with faults.

Keeps World (kube_world.py).  It answers as a 1.36 server was seen to (tests/cases/kubernetes); what it has no need of
for EndpointSlices it has not got.  Each connection has a thread; versions, history and faults are under one lock.
"""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from tests.authority import Authority
from tests.kube_world import PORT_NAME

_REASONS = {401: "Unauthorized", 403: "Forbidden", 410: "Expired", 429: "TooManyRequests", 503: "ServiceUnavailable"}
_uids = count(1)


class Asked(NamedTuple):
    """One request.  at: monotonic seconds.  verb: list or watch.  version: its resourceVersion, None if unset."""

    at: float
    verb: str
    version: str | None
    token: str
    query: dict[str, str]
    status: int


class Cut(Exception):
    """Raised where an answer's connection is to be reset."""


class Scripted(NamedTuple):
    """An answer in place of the server's own.  pieces: chunks of its body; a number is a silence of so many seconds,
    None cuts the connection there.  verb: of the request it waits for; "" for any."""

    pieces: Sequence[bytes | float | None] = ()
    status: int = 200
    headers: Sequence[str] = ()
    verb: str = ""


def failure(code: int, reason: str = "", message: str = "", **details: object) -> bytes:
    """A Status, as the body of an answer."""
    status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": code}
    status |= {"reason": reason or _REASONS.get(code, "Unknown"), "message": message or f"told to say {code}"}
    return json.dumps(status | ({"details": details} if details else {})).encode()


def error_event(code: int, reason: str = "", message: str = "", **details: object) -> bytes:
    """A Status, as an event of a watch."""
    return b'{"type":"ERROR","object":' + failure(code, reason, message, **details) + b"}\n"


class _Store:
    """What is stored, and what happened to it since `oldest`."""

    def __init__(self) -> None:
        self.version = 100
        self.oldest = 100
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.history: list[tuple[int, str, str, dict[str, Any]]] = []

    def put(self, namespace: str, item: dict[str, Any]) -> None:
        name = item["metadata"]["name"]
        old = self.objects.get((namespace, name))
        if old is not None and _content(old) == _content(item):
            return
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        self.objects[namespace, name] = item
        self.history.append((self.version, namespace, "ADDED" if old is None else "MODIFIED", item))

    def delete(self, namespace: str, name: str) -> None:
        item = json.loads(json.dumps(self.objects.pop((namespace, name))))
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        self.history.append((self.version, namespace, "DELETED", item))

    def compact(self) -> None:
        self.version += 1
        self.oldest = self.version
        self.history.clear()


class OwnWorld:
    """See World.  slice_size: endpoints in one slice at most.  bookmark_every: seconds."""

    def __init__(self, slice_size: int = 100, bookmark_every: float = 0.5) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="sg-own-"))
        authority = Authority()
        pair = authority.issue("127.0.0.1")
        self.ca = self._folder / "ca.pem"
        self.ca.write_bytes(authority.pem)
        (self._folder / "server.pem").write_bytes(pair.cert + pair.key)
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.load_cert_chain(self._folder / "server.pem")
        self._slice_size = slice_size
        self._bookmark_every = bookmark_every
        self.lock = threading.Condition()
        self.store = _Store()
        self.asked: list[Asked] = []
        self.scripted: deque[Scripted] = deque()
        self.tokens = {"token-1"}
        self.kubeconfig = self._folder / "kubeconfig"
        self.namespace = ""
        self._allowed: set[str] = set()
        self._numbers = count(1)
        self._paused = False
        self._services: dict[str, dict[str, tuple[bool, bool]]] = {}
        self._pods: dict[str, dict[str, dict[str, Any]]] = {}
        self._listener: socket.socket | None = None
        self._streams: set[socket.socket] = set()
        self.port = 0
        self.start()
        self.write_kubeconfig({"token": "token-1"})
        self.renew()

    def write_kubeconfig(self, user: dict[str, str]) -> None:
        """Name the server, its CA and this user."""
        cluster = {"server": f"https://127.0.0.1:{self.port}", "certificate-authority": str(self.ca)}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "own",
            "clusters": [{"name": "own", "cluster": cluster}],
            "users": [{"name": "own", "user": user}],
            "contexts": [{"name": "own", "context": {"cluster": "own", "user": "own"}}],
        }
        self.kubeconfig.write_text(json.dumps(config))

    def renew(self) -> None:
        self.resume()
        self.start()
        with self.lock:
            self.namespace = f"ring-{next(self._numbers)}"
            self._services[self.namespace], self._pods[self.namespace] = {}, {}
            self._allowed.add(self.namespace)
            self.asked.clear()
            self.scripted.clear()

    def host(self, number: int) -> str:
        return f"127.0.0.{number + 2}"

    def add_service(self, name: str, publish_not_ready: bool = True, dual: bool = False) -> None:
        with self.lock:
            self._services[self.namespace][name] = (publish_not_ready, dual)
            self._write_slices()

    def add_pod(
        self, name: str, ip: str, node: str, ready: bool = True, ips: Sequence[str] = (), port: int = 1051
    ) -> str:
        uid = f"00000000-0000-4000-8000-{next(_uids):012}"
        made = {"uid": uid, "ips": tuple(ips or (ip,)), "node": node, "ready": ready, "port": port, "leaving": False}
        with self.lock:
            self._pods[self.namespace][name] = made
            self._write_slices()
        return uid

    def make_ready(self, name: str, ready: bool) -> None:
        with self.lock:
            self._pods[self.namespace][name]["ready"] = ready
            self._write_slices()

    def delete_pod(self, name: str) -> None:
        with self.lock:
            self._pods[self.namespace][name]["leaving"] = True
            self._write_slices()

    def finish_pod(self, name: str) -> None:
        with self.lock:
            del self._pods[self.namespace][name]
            self._write_slices()

    def pause(self) -> None:
        with self.lock:
            self._paused = True

    def resume(self) -> None:
        with self.lock:
            self._paused = False
            self.lock.notify_all()

    def kill(self) -> None:
        with self.lock:
            if self._listener is not None:
                self._listener.shutdown(socket.SHUT_RDWR)
                self._listener.close()
                self._listener = None
        self.cut()

    def start(self) -> None:
        with self.lock:
            if self._listener is not None:
                return
            self._listener = socket.create_server(("127.0.0.1", self.port), backlog=64)
            self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def compact(self) -> None:
        with self.lock:
            self.store.compact()
        self.cut()

    def close(self) -> None:
        self.resume()
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    # What a real server would not do at a test's word.

    def cut(self) -> None:
        """Reset every connection."""
        with self.lock:
            streams = list(self._streams)
            self.lock.notify_all()
        for stream in streams:
            with suppress(OSError):
                socket.socket.shutdown(stream, socket.SHUT_RDWR)

    def allow(self, allowed: bool) -> None:
        """Whether the present namespace may be read."""
        with self.lock:
            (self._allowed.add if allowed else self._allowed.discard)(self.namespace)

    def script(self, *answers: Scripted) -> None:
        """Give these answers to the next requests, each to the first of its verb."""
        with self.lock:
            self.scripted.extend(answers)

    def put(self, item: dict[str, Any]) -> None:
        """Store a slice as it is, whatever the pods."""
        with self.lock:
            self.store.put(self.namespace, item)
            self.lock.notify_all()

    def restore(self, version: int) -> None:
        """As after a restore from a backup: the version goes back, history is gone, connections are cut."""
        with self.lock:
            self.store.version = self.store.oldest = version
            self.store.history.clear()
            for item in self.store.objects.values():
                item["metadata"]["resourceVersion"] = str(version)
        self.cut()

    def verbs(self, verb: str) -> list[Asked]:
        """The requests so far of this verb, since the last `renew`."""
        with self.lock:
            return [asked for asked in self.asked if asked.verb == verb]

    # The endpointslice controller.

    def _write_slices(self) -> None:
        """Bring the slices to what the pods say; under the lock."""
        here = self.namespace
        for service, (publish, dual) in self._services[here].items():
            groups: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
            for name, pod in sorted(self._pods[here].items()):
                for family in ("IPv4", "IPv6") if dual else ("IPv4",):
                    found = [ip for ip in pod["ips"] if (":" in ip) == (family == "IPv6")]
                    if found:
                        groups.setdefault((family, pod["port"]), {})[name] = _endpoint(
                            name, here, pod, found[0], publish
                        )
            wanted = dict(self._filled(service, groups))
            if not wanted:
                wanted[f"{service}-none"] = _slice(f"{service}-none", here, service, "IPv4", None, None)
            for item in wanted.values():
                self.store.put(here, item)
            held = [
                name for (space, name), item in self.store.objects.items() if space == here and _of(item) == service
            ]
            for name in held:
                if name not in wanted:
                    self.store.delete(here, name)
        self.lock.notify_all()

    def _filled(
        self, service: str, groups: dict[tuple[str, int], dict[str, dict[str, Any]]]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Slices of at most so many endpoints; a pod stays in the slice that it is in."""
        for (family, port), ends in groups.items():
            places: dict[str, int] = {}
            for (space, _), item in self.store.objects.items():
                key = item["metadata"]["annotations"]
                if space == self.namespace and _of(item) == service and key.get("group") == f"{family}-{port}":
                    places |= {end["targetRef"]["uid"]: int(key["number"]) for end in item["endpoints"] or ()}
            rooms: dict[int, list[dict[str, Any]]] = {}
            for end in ends.values():
                number = places.get(end["targetRef"]["uid"])
                if number is None:
                    number = next(n for n in count() if len(rooms.get(n, ())) < self._slice_size)
                rooms.setdefault(number, []).append(end)
            for number, room in rooms.items():
                name = f"{service}-{family.lower()}-{port}-{number}"
                item = _slice(name, self.namespace, service, family, port, room)
                item["metadata"]["annotations"] = {"group": f"{family}-{port}", "number": str(number)}
                yield name, item

    # The door.

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                stream, _ = listener.accept()
            except OSError:
                return
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(stream,), daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        stream: socket.socket = plain
        with self.lock:
            self._streams.add(plain)
        try:
            self._wait_while_paused()
            stream = self._tls.wrap_socket(plain, server_side=True)
            with self.lock:
                self._streams.discard(plain)
                self._streams.add(stream)
                if self._listener is None:
                    return
            with stream.makefile("rb") as reader:
                while self._answer(stream, reader):
                    pass
        except (OSError, ValueError, Cut):
            pass
        finally:
            with self.lock:
                self._streams -= {plain, stream}
            with suppress(OSError):
                socket.socket.shutdown(stream, socket.SHUT_RDWR)
            stream.close()

    def _wait_while_paused(self) -> None:
        with self.lock:
            while self._paused:
                self.lock.wait()

    def _answer(self, stream: socket.socket, reader: Any) -> bool:
        """One request; False when the connection is over."""
        line = reader.readline(65_536)
        if not line:
            return False
        target = line.split()[1].decode()
        headers = {}
        while (header := reader.readline(65_536)) not in (b"\r\n", b""):
            name, _, value = header.decode().partition(":")
            headers[name.strip().lower()] = value.strip()
        self._wait_while_paused()
        place = urlsplit(target)
        query = {name: values[-1] for name, values in parse_qs(place.query, keep_blank_values=True).items()}
        verb = "watch" if query.get("watch", "").lower() == "true" else "list"
        scheme, _, token = headers.get("authorization", "").partition(" ")
        token = token.strip() if scheme.lower() == "bearer" else ""
        with self.lock:
            script = next((one for one in self.scripted if one.verb in ("", verb)), None)
            if script is not None:
                self.scripted.remove(script)
            status = script.status if script is not None else self._status(unquote(place.path), token, verb, query)
            self.asked.append(Asked(time.monotonic(), verb, query.get("resourceVersion"), token, query, status))
            listed = self._listed() if status == 200 else b""
        if script is not None:
            self._send_script(stream, script)
        elif status == 504:
            told = f"Timeout: Too large resource version: {query['resourceVersion']}, current: {self.store.version}"
            causes = [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}]
            body = failure(504, "Timeout", told, causes=causes, retryAfterSeconds=1)
            _send(stream, 504, body, ["Retry-After: 1"])
        elif status != 200:
            _send(stream, status, failure(status))
        elif verb == "list":
            items = self._selected(listed, query)
            _send(stream, 200, _list_of(items, json.loads(listed)["version"]))
        else:
            self._watch(stream, query)
        return True

    def _status(self, path: str, token: str, verb: str, query: dict[str, str]) -> int:
        if token not in self.tokens:
            return 401
        parts = path.strip("/").split("/")
        if parts[:4] != ["apis", "discovery.k8s.io", "v1", "namespaces"] or parts[5:] != ["endpointslices"]:
            return 403
        if parts[4] not in self._allowed:
            return 403
        query["namespace"] = parts[4]
        version = query.get("resourceVersion") or "0"
        # A watch from a version to come is taken, and is silent until then.
        return 504 if verb == "list" and int(version) > self.store.version else 200

    def _listed(self) -> bytes:
        items = [(space, item) for (space, _), item in self.store.objects.items()]
        return json.dumps({"version": self.store.version, "items": items}).encode()

    def _selected(self, listed: bytes, query: dict[str, str]) -> list[dict[str, Any]]:
        return [item for space, item in json.loads(listed)["items"] if _chosen(space, item, query)]

    def _watch(self, stream: socket.socket, query: dict[str, str]) -> None:
        end = time.monotonic() + float(query.get("timeoutSeconds", 1800))
        version = int(query.get("resourceVersion") or 0)
        _head(stream, 200, [])
        pending: list[bytes] = []
        with self.lock:
            if 0 < version < self.store.oldest:
                pending.append(
                    error_event(410, "Expired", f"too old resource version: {version} ({self.store.oldest})")
                )
                end = 0.0
            if version == 0:
                listed = self._selected(self._listed(), query)
                pending += [_event("ADDED", item) for item in listed]
                version = self.store.version
        bookmark = time.monotonic() + self._bookmark_every
        while True:
            for line in pending:
                # Events need not come chunk by chunk: here each comes in two.
                half = len(line) // 2
                _chunk(stream, line[:half])
                _chunk(stream, line[half:])
            pending = []
            now = time.monotonic()
            if now >= end:
                stream.sendall(b"0\r\n\r\n")
                return
            with self.lock:
                while self._paused:
                    self.lock.wait()
                if stream not in self._streams or self._listener is None:
                    raise Cut
                new = [one for one in self.store.history if one[0] > version]
                if not new and now < bookmark:
                    self.lock.wait(min(bookmark, end) - now)
                    new = [one for one in self.store.history if one[0] > version]
                pending += [_event(kind, item) for _, space, kind, item in new if _chosen(space, item, query)]
                version = max([version, *(one[0] for one in new)])
                if time.monotonic() >= bookmark:
                    bookmark = time.monotonic() + self._bookmark_every
                    if query.get("allowWatchBookmarks", "").lower() == "true":
                        version = self.store.version
                        pending.append(_bookmark(version))

    def _send_script(self, stream: socket.socket, script: Scripted) -> None:
        if script.status != 200:
            body = b"".join(piece for piece in script.pieces if isinstance(piece, bytes))
            _send(stream, script.status, body, script.headers)
            return
        _head(stream, 200, script.headers)
        for piece in script.pieces:
            if piece is None:
                raise Cut
            if isinstance(piece, bytes):
                _chunk(stream, piece)
            else:
                with self.lock:
                    self.lock.wait_for(lambda: stream not in self._streams, piece)
        stream.sendall(b"0\r\n\r\n")


def _content(item: dict[str, Any]) -> dict[str, Any]:
    return {name: item[name] for name in ("addressType", "endpoints", "ports")}


def _of(item: dict[str, Any]) -> str:
    return str(item["metadata"]["labels"]["kubernetes.io/service-name"])


def _chosen(space: str, item: dict[str, Any], query: dict[str, str]) -> bool:
    name, _, value = query.get("labelSelector", "").partition("=")
    return space == query["namespace"] and (not name or item["metadata"]["labels"].get(name) == value)


def _endpoint(name: str, namespace: str, pod: dict[str, Any], ip: str, publish: bool) -> dict[str, Any]:
    ready, leaving = pod["ready"], pod["leaving"]
    return {
        "addresses": [ip],
        "conditions": {"ready": publish or (ready and not leaving), "serving": ready, "terminating": leaving},
        "targetRef": {"kind": "Pod", "namespace": namespace, "name": name, "uid": pod["uid"]},
        "nodeName": pod["node"],
    }


def _slice(
    name: str, namespace: str, service: str, family: str, port: int | None, endpoints: list[dict[str, Any]] | None
) -> dict[str, Any]:
    labels = {"kubernetes.io/service-name": service, "service.kubernetes.io/headless": ""}
    return {
        "metadata": {"name": name, "namespace": namespace, "labels": labels, "annotations": {}},
        "addressType": family,
        "endpoints": endpoints,
        "ports": None if port is None else [{"name": PORT_NAME, "protocol": "TCP", "port": port}],
    }


def _list_of(items: Iterable[dict[str, Any]], version: int) -> bytes:
    listed = {"kind": "EndpointSliceList", "apiVersion": "discovery.k8s.io/v1", "items": list(items)}
    return json.dumps(listed | {"metadata": {"resourceVersion": str(version)}}).encode()


def _event(kind: str, item: dict[str, Any]) -> bytes:
    whole = {"kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1", **item}
    return json.dumps({"type": kind, "object": whole}).encode() + b"\n"


def _bookmark(version: int) -> bytes:
    item = {"metadata": {"resourceVersion": str(version)}, "addressType": "", "endpoints": None, "ports": None}
    return _event("BOOKMARK", item)


def _head(stream: socket.socket, status: int, headers: Sequence[str], length: int | None = None) -> None:
    how = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    lines = [f"HTTP/1.1 {status} Told", "Content-Type: application/json", how, *headers, "", ""]
    stream.sendall("\r\n".join(lines).encode())


def _send(stream: socket.socket, status: int, body: bytes, headers: Sequence[str] = ()) -> None:
    _head(stream, status, headers, len(body))
    stream.sendall(body)


def _chunk(stream: socket.socket, piece: bytes) -> None:
    if piece:
        stream.sendall(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
