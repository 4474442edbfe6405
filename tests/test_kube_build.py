"""`make kube`, with a `go` of the test's own: when it builds, what it leaves, and what it says when it cannot."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests import kube_build
from tests.kube_build import MODULES, CannotBuild, build, folder, is_built, main, version

WRITES = """
while [ "$1" != -o ]; do shift; done
echo "$GOCACHE" >> "$CALLS"
echo cached > "$GOCACHE/thing"
shift; [ -d "$1" ] && touch "$1/kube-apiserver" "$1/kube-controller-manager" || touch "$1"
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """A user with an empty cache folder and a path with the system's tools; no Go."""
    for name in ("bin", "cache"):
        (tmp_path / name).mkdir()
    for tool in ("cat", "sh", "sleep", "touch"):
        (tmp_path / "bin" / tool).symlink_to(f"/bin/{tool}")
    return {"PATH": str(tmp_path / "bin"), "XDG_CACHE_HOME": str(tmp_path / "cache"), "CALLS": str(tmp_path / "calls")}


def install_go(environ: dict[str, str], script: str) -> None:
    """Have `go` be this shell script."""
    go = Path(environ["PATH"]) / "go"
    go.write_text(f"#!/bin/sh\n{script}")
    go.chmod(0o755)


def left(environ: dict[str, str]) -> list[str]:
    """What the cache folder holds, but for the lock and what is built."""
    every = Path(environ["XDG_CACHE_HOME"]).glob("sidegate/*")
    return [file.name for file in every if file.name not in ("making.lock", folder(environ).name)]


def test_kept_in_the_cache_folder() -> None:
    """The programs are kept in the user's cache folder, under the version that go.mod requires."""
    assert re.fullmatch(r"1\.\d+\.\d+", version())
    assert folder({"XDG_CACHE_HOME": "/x", "HOME": "/h"}) == Path(f"/x/sidegate/kube-{version()}")
    assert folder({"HOME": "/h"}) == Path(f"/h/.cache/sidegate/kube-{version()}")
    assert folder({"XDG_CACHE_HOME": "", "HOME": "/h"}) == Path(f"/h/.cache/sidegate/kube-{version()}")


def test_built_once(environ: dict[str, str]) -> None:
    """All three programs are built, what the build needed is gone, and the next call builds nothing."""
    install_go(environ, WRITES)
    assert main(environ) == 0
    kept = folder(environ)
    names = ["etcd", "kube-apiserver", "kube-controller-manager", "made-of"]
    assert sorted(file.name for file in kept.iterdir()) == names
    caches = Path(environ["CALLS"]).read_text().split()
    assert caches
    assert not any(Path(cache).exists() for cache in caches)
    assert left(environ) == []
    assert main(environ) == 0
    build(kept, environ)
    assert Path(environ["CALLS"]).read_text().split() == caches


def test_built_anew_for_other_modules(environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout that pins another sum does not use what was built from this one's."""
    install_go(environ, WRITES)
    assert main(environ) == 0
    for file in MODULES.glob("*/go.*"):
        copy = tmp_path / "kube" / file.relative_to(MODULES)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
    monkeypatch.setattr(kube_build, "MODULES", tmp_path / "kube")
    assert is_built(folder(environ))
    with (tmp_path / "kube/etcd/go.sum").open("a") as sums:
        sums.write("another\n")
    assert not is_built(folder(environ))
    calls = Path(environ["CALLS"]).read_text().split()
    assert main(environ) == 0
    assert is_built(folder(environ))
    assert len(Path(environ["CALLS"]).read_text().split()) == 2 * len(calls)


def test_without_go(environ: dict[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    """Without Go it says so and that tests will skip, and is no failure."""
    assert main(environ) == 0
    said = capfd.readouterr().err
    assert "NO REAL API SERVER: Go is not installed" in said
    assert "will skip" in said
    assert not is_built(folder(environ))


def test_refused(environ: dict[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    """Go's own reason is told, without the list of what it fetched; nothing is left."""
    install_go(
        environ, 'echo "go: downloading x v1"; echo "x: reading y: 404 Not Found" >&2; touch "$GOCACHE/z"; exit 1'
    )
    assert main(environ) == 0
    said = capfd.readouterr().err
    assert "NO REAL API SERVER: go build in tests/kube/etcd failed:\nx: reading y: 404 Not Found\n" in said
    assert "downloading" not in said
    assert left(environ) == []
    assert not folder(environ).exists()


def test_too_slow(environ: dict[str, str], tmp_path: Path) -> None:
    """A build that takes too long is ended with all its processes, and nothing is left."""
    install_go(environ, 'sleep 600 & echo $! > "$CALLS"; wait')
    with pytest.raises(CannotBuild, match="took too long"):
        build(folder(environ), environ, longest=0.5)
    child = Path(f"/proc/{Path(environ['CALLS']).read_text().strip()}/stat")
    assert not child.exists() or child.read_text().rpartition(")")[2].split()[0] in "ZX"
    assert left(environ) == []


def test_left_by_a_killed_build(environ: dict[str, str]) -> None:
    """What a build that was killed left behind is in nobody's way, and goes."""
    install_go(environ, WRITES)
    making = Path(environ["XDG_CACHE_HOME"]) / "sidegate" / f"kube-{version()}.making"
    (making / "compiled").mkdir(parents=True)
    (making / "etcd").write_text("half")
    assert main(environ) == 0
    assert is_built(folder(environ))
    assert left(environ) == []
    assert os.path.getsize(folder(environ) / "etcd") == 0
