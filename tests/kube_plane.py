"""A real Kubernetes control plane on loopback: etcd, kube-apiserver and its controllers, as `make kube` built them.

Decides how the three are started, stopped and set back to an older state.  There is no scheduler and no kubelet: who
wants pods writes them, their status too.  Knows nothing of Sidegate.
"""

from __future__ import annotations

import http.client
import json
import secrets
import shutil
import signal
import ssl
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.authority import Authority
from tests.clusters import free_port
from tests.daemons import wait_until

READY_SECONDS = 90.0
"""It takes 3 s on an idle machine."""
STRATEGIC = "application/strategic-merge-patch+json"
"""A patch by which a list of named things keeps those that it does not name."""


class Refused(Exception):
    """The API server's answer to what a test asked of it is no."""

    def __init__(self, status: int, answer: Mapping[str, Any]) -> None:
        super().__init__(f"{status}: {answer.get('message', answer)}")
        self.status = status


class Program:
    """One process; what it prints stands in `log`."""

    def __init__(self, words: Sequence[str], log: Path) -> None:
        self.words = words
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, if it does not run."""
        if not self.runs:
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(self.words, stdout=log, stderr=log, cwd=self.log.parent)

    @property
    def runs(self) -> bool:
        """Whether it does; a paused one does."""
        return self._process is not None and self._process.poll() is None

    def pause(self) -> None:
        """SIGSTOP, and wait until it stands still: connections and bytes are still accepted, by the kernel."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self._process.pid}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "the process stands still")

    def resume(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def tail(self) -> str:
        """The last that it printed, for who reads a failure."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join([f"{self.log}:", *lines[-30:]])


class ControlPlane:
    """The three, with their files in `folder`.  built: the folder of programs (kube_build).

    slice_size: endpoints in one slice at most (Kubernetes' own default
    is 100; a few pods then fill several).
    """

    def __init__(self, folder: Path, built: Path, slice_size: int = 100) -> None:
        self.folder = folder
        self.port = free_port()
        self.etcd_port = free_port()
        self._admin = secrets.token_hex(16)
        self.ca = folder / "ca.pem"
        self._write_files()
        self._context = ssl.create_default_context(cafile=str(self.ca))
        self.etcd = Program(self._etcd_words(built), folder / "etcd.log")
        self.api = Program(self._api_words(built), folder / "kube-apiserver.log")
        self.controllers = Program(self._controller_words(built, slice_size), folder / "kube-controller-manager.log")

    def start(self) -> None:
        """Start what does not run, and wait until the API server says that it is ready."""
        self.etcd.start()
        self._wait(self.etcd, self._etcd_is_healthy)
        self.api.start()
        self._wait(self.api, self._is_ready)
        self.controllers.start()

    def forget_history(self) -> None:
        """Have etcd hold nothing but the newest revision, one that nobody has seen.  The API server must be down, and
        forgets its own history by that."""
        # An etcd key beside those of the API server, whose resource versions are etcd's revisions.
        put = self._etcd("/v3/kv/put", {"key": "c2lkZWdhdGU=", "value": "dGVzdA=="})
        self._etcd("/v3/kv/compaction", {"revision": put["header"]["revision"], "physical": True})

    def copy_state(self) -> Path:
        """A copy of all that is stored, to `restore`; etcd is away for the moment that it takes."""
        copy = self.folder / f"copy-{secrets.token_hex(4)}"
        self.etcd.end()
        shutil.copytree(self.folder / "etcd", copy)
        self.start()
        return copy

    def restore(self, copy: Path) -> None:
        """Set all back to a copy, as an operator restores a backup: resource versions go backwards."""
        self.close()
        shutil.rmtree(self.folder / "etcd")
        shutil.copytree(copy, self.folder / "etcd")
        self.start()

    def close(self) -> None:
        """End all three."""
        for program in (self.controllers, self.api, self.etcd):
            program.end()

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None, kind: str = "") -> dict[str, Any]:
        """Ask the API server as cluster-admin; raises Refused, OSError.  kind: the body's content type."""
        return self._answer(method, path, body, kind or "application/json", 30.0)

    def create(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Make an object; `path` is that of its kind."""
        return self.call("POST", path, body)

    def delete(self, path: str, **options: object) -> None:
        """Delete an object; one that is not there does no harm."""
        try:
            self.call("DELETE", path, {"kind": "DeleteOptions", "apiVersion": "v1", **options})
        except Refused as refused:
            if refused.status != 404:
                raise

    def _answer(self, method: str, path: str, body: object, kind: str, seconds: float) -> dict[str, Any]:
        connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=seconds, context=self._context)
        try:
            headers = {"Authorization": f"Bearer {self._admin}", "Content-Type": kind}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            text = response.read()
        finally:
            connection.close()
        if path == "/readyz":
            return {"status": response.status}
        answer: dict[str, Any] = json.loads(text)
        if response.status >= 300:
            raise Refused(response.status, answer)
        return answer

    def _is_ready(self) -> bool:
        try:
            return bool(self._answer("GET", "/readyz", None, "", 2.0)["status"] == 200)
        except (OSError, http.client.HTTPException):
            return False

    def _etcd(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.etcd_port, timeout=10)
        try:
            connection.request("POST", path, json.dumps(body))
            response = connection.getresponse()
            answer: dict[str, Any] = json.loads(response.read())
        finally:
            connection.close()
        assert response.status == 200, answer
        return answer

    def _etcd_is_healthy(self) -> bool:
        try:
            return bool(self._etcd("/v3/maintenance/status", {}).get("leader"))
        except (OSError, http.client.HTTPException, AssertionError):
            return False

    def _wait(self, program: Program, condition: Any) -> None:
        end = time.monotonic() + READY_SECONDS
        while not condition():
            assert program.runs, f"ended by itself; {program.tail()}"
            assert time.monotonic() < end, f"not ready after {READY_SECONDS} s; {program.tail()}"
            time.sleep(0.05)

    def _write_files(self) -> None:
        authority = Authority()
        pair = authority.issue("127.0.0.1", "kubernetes.default.svc", rsa=True)
        self.ca.write_bytes(authority.pem)
        (self.folder / "cert.pem").write_bytes(pair.cert)
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        plain = serialization.NoEncryption()
        pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        secret = {
            "key.pem": pair.key,
            "accounts.pem": key.private_bytes(pem, pkcs8, plain),
            "tokens.csv": f'{self._admin},admin,admin,"system:masters"\n'.encode(),
            "kubeconfig": self.kubeconfig(self._admin).encode(),
        }
        for name, text in secret.items():
            (self.folder / name).touch(mode=0o600)
            (self.folder / name).write_bytes(text)

    def kubeconfig(self, token: str) -> str:
        """The text of a kubeconfig for this token's user (JSON is YAML)."""
        cluster = {"server": f"https://127.0.0.1:{self.port}", "certificate-authority": str(self.ca)}
        return json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "test", "cluster": cluster}],
                "users": [{"name": "user", "user": {"token": token}}],
                "contexts": [{"name": "test", "context": {"cluster": "test", "user": "user"}}],
                "current-context": "test",
            }
        )

    def _etcd_words(self, built: Path) -> list[str]:
        clients, others = (f"http://127.0.0.1:{port}" for port in (self.etcd_port, free_port()))
        return [
            f"{built / 'etcd'}",
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={clients}",
            f"--advertise-client-urls={clients}",
            f"--listen-peer-urls={others}",
            f"--initial-advertise-peer-urls={others}",
            f"--initial-cluster=default={others}",
            "--unsafe-no-fsync",
        ]

    def _api_words(self, built: Path) -> list[str]:
        return [
            f"{built / 'kube-apiserver'}",
            f"--etcd-servers=http://127.0.0.1:{self.etcd_port}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self.port}",
            "--advertise-address=127.0.0.1",
            "--endpoint-reconciler-type=none",
            f"--cert-dir={self.folder / 'made-by-kube-apiserver'}",
            f"--tls-cert-file={self.folder / 'cert.pem'}",
            f"--tls-private-key-file={self.folder / 'key.pem'}",
            "--service-cluster-ip-range=10.96.0.0/16,fd00:10:96::/112",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={self.folder / 'accounts.pem'}",
            f"--service-account-signing-key-file={self.folder / 'accounts.pem'}",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--allow-privileged=true",
            # Pods need no account and no token here: none of them runs.
            "--disable-admission-plugins=ServiceAccount",
        ]

    def _controller_words(self, built: Path, slice_size: int) -> list[str]:
        return [
            f"{built / 'kube-controller-manager'}",
            f"--kubeconfig={self.folder / 'kubeconfig'}",
            "--controllers=endpointslice-controller,namespace-controller,garbage-collector-controller",
            "--leader-elect=false",
            "--secure-port=0",
            f"--max-endpoints-per-slice={slice_size}",
            "--kube-api-qps=500",
            "--kube-api-burst=1000",
        ]
