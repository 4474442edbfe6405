"""Where the daemon is found, in every branch of the one rule."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sidecar.address import SOCKET_VARIABLE, SYSTEM_FOLDER, socket_path, strip_scheme


@pytest.fixture
def nowhere(tmp_path: Path) -> str:
    """A system folder that is not there and cannot be made."""
    return str(tmp_path / "missing" / "sidegate")


@pytest.mark.parametrize(
    ("named", "path"),
    [
        ("/srv/x.sock", "/srv/x.sock"),
        ("unix:///srv/x.sock", "/srv/x.sock"),
        ("x.sock", "x.sock"),
        ("unix:x.sock", "unix:x.sock"),
        ("/srv/unix://x.sock", "/srv/unix://x.sock"),
    ],
)
def test_a_named_socket_comes_first(named: str, path: str, tmp_path: Path) -> None:
    """SIDEGATE_SOCKET wins over every folder, with or without its scheme."""
    environ = {SOCKET_VARIABLE: named, "XDG_RUNTIME_DIR": str(tmp_path)}
    assert socket_path(environ, str(tmp_path)) == path
    assert strip_scheme(named) == path


@pytest.mark.parametrize("environ", [{}, {SOCKET_VARIABLE: ""}])
def test_the_system_folder_comes_next(environ: dict[str, str], tmp_path: Path) -> None:
    """Where the system's folder is there, the socket is in it, whatever else is set; an empty variable is none."""
    environ = {**environ, "XDG_RUNTIME_DIR": str(tmp_path), "TMPDIR": str(tmp_path)}
    folder = tmp_path / "run"
    folder.mkdir()
    assert socket_path(environ, str(folder)) == str(folder / "sidegate.sock")


def test_a_system_folder_that_could_be_made_will_do(tmp_path: Path) -> None:
    """The folder may be missing where this process could make it; nothing is made yet."""
    folder = tmp_path / "sidegate"
    assert socket_path({"XDG_RUNTIME_DIR": str(tmp_path)}, str(folder)) == str(folder / "sidegate.sock")
    assert not folder.exists()


@pytest.mark.parametrize("kind", ["no parent", "a file", "a dangling link", "closed", "closed parent"])
def test_an_unusable_system_folder_is_passed_over(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system folder that cannot hold a socket for this process gives way to the user's runtime folder."""
    folder = tmp_path / "system" / "sidegate"
    if kind != "no parent":
        folder.parent.mkdir()
    if kind == "a file":
        folder.touch()
    elif kind == "a dangling link":
        folder.symlink_to(tmp_path / "gone")
    elif kind == "closed":
        folder.mkdir()
    if kind.startswith("closed"):
        # The superuser may enter everything, so the answer of a closed folder is given by hand.
        monkeypatch.setattr(os, "access", lambda path, mode: False)
    runtime = tmp_path / "user"
    runtime.mkdir()
    found = socket_path({"XDG_RUNTIME_DIR": str(runtime)}, str(folder))
    assert found == str(runtime / "sidegate" / "sidegate.sock")


@pytest.mark.parametrize("runtime", [None, "", "gone", "file"])
def test_a_folder_of_the_users_own_comes_last(runtime: str | None, nowhere: str, tmp_path: Path) -> None:
    """Without a runtime folder that is there, the socket is in a folder named for the user, below the temp folder."""
    (tmp_path / "file").touch()
    environ = {"TMPDIR": "/temp"}
    if runtime is not None:
        environ["XDG_RUNTIME_DIR"] = runtime and str(tmp_path / runtime)
    assert socket_path(environ, nowhere) == f"/temp/sidegate-{os.getuid()}/sidegate.sock"


@pytest.mark.parametrize("environ", [{}, {"TMPDIR": ""}])
def test_the_temp_folder_has_a_default(environ: dict[str, str], nowhere: str) -> None:
    """Without TMPDIR the temp folder is the usual one."""
    assert socket_path(environ, nowhere) == f"/tmp/sidegate-{os.getuid()}/sidegate.sock"


def test_daemon_and_client_find_the_same_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Called without arguments, as both ends do, the rule takes the process's environment and the system's folder."""
    monkeypatch.setenv(SOCKET_VARIABLE, "/srv/y.sock")
    assert socket_path() == "/srv/y.sock"
    assert SYSTEM_FOLDER == "/run/sidegate"
