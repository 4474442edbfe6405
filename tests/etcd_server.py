"""A real etcd for tests, on free ports of 127.0.0.1 and with its data in a folder of the test's own."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.authority import Authority
from tests.clusters import free_port
from tests.daemons import wait_until


def need_etcd() -> None:
    """Skip where there is no etcd; fail where CI is set."""
    missing = [name for name in ("etcd", "etcdctl") if shutil.which(name) is None]
    if missing:
        if os.environ.get("CI"):
            pytest.fail(f"{missing[0]} is missing, which .ci/run installs")
        pytest.skip(f"{missing[0]} is not installed")


class EtcdServer:
    """One etcd.  authority: who signs its certificate and must have signed those of clients; None: plain text."""

    def __init__(self, folder: Path, *options: str, authority: Authority | None = None) -> None:
        need_etcd()
        self._folder = folder
        folder.mkdir()
        self.port, self._peer_port, self._facts_port = free_port(), free_port(), free_port()
        self.endpoint = f"127.0.0.1:{self.port}"
        scheme = "http"
        self._ctl: list[str] = []
        if authority is not None:
            scheme = "https"
            pair = authority.issue()
            files = {"ca": authority.pem, "cert": pair.cert, "key": pair.key}
            for name, content in files.items():
                (folder / f"{name}.pem").write_bytes(content)
            ca, cert, key = (str(folder / f"{name}.pem") for name in files)
            options += ("--cert-file", cert, "--key-file", key, "--trusted-ca-file", ca, "--client-cert-auth")
            self._ctl = ["--cacert", ca, "--cert", cert, "--key", key]
        peers = f"http://127.0.0.1:{self._peer_port}"
        self._words = [
            "etcd",
            *("--name", "one", "--logger", "zap", "--log-level", "error"),
            *("--listen-client-urls", f"{scheme}://{self.endpoint}"),
            *("--advertise-client-urls", f"{scheme}://{self.endpoint}"),
            *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers, "--initial-cluster", f"one={peers}"),
            *("--listen-metrics-urls", f"http://127.0.0.1:{self._facts_port}"),
            *options,
        ]
        self._lives = 0
        self.user = ""
        self.start()

    def start(self, empty: bool = False) -> None:
        """Start (again), with the data that it had or with none, and wait until it is healthy."""
        self._lives += empty
        data = self._folder / f"data-{self._lives}"
        with (self._folder / "log").open("ab") as log:
            self.process = subprocess.Popen([*self._words, "--data-dir", str(data)], stdout=log, stderr=log)
        wait_until(self._healthy, "etcd is healthy")

    def _healthy(self) -> bool:
        assert self.process.poll() is None, (self._folder / "log").read_text()
        try:
            return '"true"' in self._facts("health")
        except OSError:
            return False

    def _facts(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._facts_port}/{path}", timeout=2) as answer:
            return str(answer.read().decode())

    def calls(self, method: str) -> int:
        """How many calls of this method it has taken in this life."""
        found = re.search(rf'grpc_server_started_total{{grpc_method="{method}",.*}} (\S+)', self._facts("metrics"))
        return int(float(found[1])) if found else 0

    def ctl(self, *words: str) -> str:
        """What etcdctl prints."""
        user = ["--user", self.user] if self.user else []
        environment = {**os.environ, "ETCDCTL_API": "3"}
        run = ["etcdctl", "--endpoints", self.endpoint, *self._ctl, *user, *words]
        done = subprocess.run(run, capture_output=True, text=True, timeout=30, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def registered(self, prefix: str = "/sidegate/peers/") -> dict[str, Any]:
        """Key -> (lease) of all below the prefix."""
        found = json.loads(self.ctl("get", "--prefix", prefix, "-w", "json"))
        return {base64.b64decode(pair["key"]).decode(): pair.get("lease", 0) for pair in found.get("kvs", ())}

    def revoke(self, lease: int) -> None:
        """End a lease, by an operator's hand."""
        self.ctl("lease", "revoke", f"{lease:x}")

    def pause(self) -> None:
        """SIGSTOP: it still takes connections and bytes."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, whatever state it is in."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
