"""`make kube`: a real kube-apiserver, its controllers and an etcd for tests/kube_real.py, built from source, once.

Decides what is built (tests/kube: two Go modules that pin every version and sum), where it is kept (the user's cache
folder, one folder a version), when what stands there will do, and that whatever a build needed is gone after it.
Knows nothing of how the servers are run.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

MODULES = Path(__file__).parent / "kube"
LONGEST = 25 * 60.0
"""Seconds that a build may take: four times what it needs on two idle cores, and short of CI's patience."""

_API = "k8s.io/kubernetes/cmd/kube-apiserver"
_CONTROLLERS = "k8s.io/kubernetes/cmd/kube-controller-manager"
_ETCD = "go.etcd.io/etcd/server/v3"


class CannotBuild(Exception):
    """Why there is no server; its text is for whoever asked for one."""


def version() -> str:
    """Of Kubernetes, as 1.36.3."""
    found = re.search(r"^require k8s\.io/kubernetes v(\S+)$", (MODULES / "kubernetes/go.mod").read_text(), re.MULTILINE)
    assert found, "tests/kube/kubernetes/go.mod requires a version"
    return found[1]


def folder(environ: Mapping[str, str]) -> Path:
    """Where the built programs are kept: kube-apiserver, kube-controller-manager, etcd."""
    cache = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or Path.home()) / ".cache"
    return Path(cache) / "sidegate" / f"kube-{version()}"


def is_built(kept: Path) -> bool:
    """Whether the folder holds what the modules of this checkout would make."""
    try:
        return (kept / "made-of").read_text() == _digest()
    except OSError:
        return False


def build(kept: Path, environ: Mapping[str, str], longest: float = LONGEST) -> None:
    """Make the folder hold the programs, whole or not at all; raises CannotBuild.  longest: seconds."""
    _check_go(environ)
    making = kept.parent / f"{kept.name}.making"
    kept.parent.mkdir(parents=True, exist_ok=True)
    with (kept.parent / "making.lock").open("w") as lock:
        # Two checkouts of one user: the second waits for the first, and finds it done.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_built(kept):
            return
        _remove(making)
        try:
            _compile(making, environ, time.monotonic() + longest)
            (making / "made-of").write_text(_digest())
            for needed in ("compiled", "modules", "go"):
                _remove(making / needed)
            _remove(kept)
            making.rename(kept)
        finally:
            _remove(making)


def _check_go(environ: Mapping[str, str]) -> None:
    if shutil.which("go", path=environ.get("PATH", "")) is None:
        raise CannotBuild("Go is not installed (`go` is not on the path)")


def _compile(making: Path, environ: Mapping[str, str], end: float) -> None:
    """All three programs into `making`, with Go's caches in it too."""
    caches = {"GOCACHE": "compiled", "GOMODCACHE": "modules", "GOPATH": "go"}
    own = {name: str(making / place) for name, place in caches.items()}
    for place in own.values():
        Path(place).mkdir(parents=True)
    # GOFLAGS of the user's are for his own modules; -modcacherw, so that the module cache can be removed.
    environment = {**environ, **own, "CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false -modcacherw", "GOWORK": "off"}
    major, minor, _ = version().split(".")
    told = {"gitVersion": f"v{version()}", "gitMajor": major, "gitMinor": minor}
    stamp = " ".join(f"-X k8s.io/component-base/version.{name}={value}" for name, value in told.items())
    for module, flags, output, packages in (
        ("etcd", "-s -w", "etcd", [_ETCD]),
        ("kubernetes", f"-s -w {stamp}", ".", [_API, _CONTROLLERS]),
    ):
        # -p 2: the linker and the API server's own packages take up to 2 GiB each.
        words = ["go", "build", "-p", "2", "-trimpath", "-ldflags", flags, "-o", f"{making / output}", *packages]
        _run(words, MODULES / module, environment, end)


def _run(words: Sequence[str], where: Path, environment: Mapping[str, str], end: float) -> None:
    nice = ["nice"] if shutil.which("nice", path=environment.get("PATH", "")) else []
    # A group of its own, because Go's compilers outlive a `go` that is killed.
    building = subprocess.Popen(
        [*nice, *words],
        cwd=where,
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = building.communicate(timeout=max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise CannotBuild("the build took too long") from None
    finally:
        if building.returncode is None:
            os.killpg(building.pid, signal.SIGKILL)
            building.wait()
    if building.returncode != 0:
        lines = [line for line in said.splitlines() if not line.startswith("go: downloading")]
        raise CannotBuild("\n".join([f"go build in tests/kube/{where.name} failed:", *lines[-20:]]))


def _digest() -> str:
    """Of all that decides what is built."""
    made_of = hashlib.sha256()
    for file in (MODULES / module / name for module in ("kubernetes", "etcd") for name in ("go.mod", "go.sum")):
        made_of.update(file.read_bytes())
    return made_of.hexdigest()


def _remove(place: Path) -> None:
    if place.exists():
        shutil.rmtree(place)


def main(environ: Mapping[str, str]) -> int:
    """Build unless built; 0 also where it cannot be done, for the tests then skip, and say so."""
    kept = folder(environ)
    if is_built(kept):
        return 0
    print(f"Building kube-apiserver {version()} and etcd into {kept}: once, 6 minutes on two idle cores.", flush=True)
    try:
        build(kept, environ)
    except CannotBuild as why:
        print(f"NO REAL API SERVER: {why}\nThe tests against a real kube-apiserver will skip.", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(os.environ))
