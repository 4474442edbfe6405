"""The `sidegate` command as a person or a script runs it: words in, output and exit status out."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemons import EPOCH, DaemonProcess, clean_environment, running_daemon

LIMIT = ("--limit", "3", "--per", "1m")
END = EPOCH + 60_000


@pytest.fixture(scope="module")
def shared() -> Iterator[DaemonProcess]:
    """One daemon for this file; tests keep out of each other's way by their keys and move no clock."""
    with running_daemon() as daemon:
        yield daemon


class Done:
    """A command that has ended."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "sidecar", *arguments],
            env=clean_environment(**environment),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        self.status, self.out, self.errors = done.returncode, done.stdout, done.stderr
        assert "Traceback" not in self.errors, self.errors

    @property
    def data(self) -> Any:
        """Its output as JSON."""
        return json.loads(self.out)

    def refused(self) -> str:
        """Its one line of complaint; exit status 2 and no output."""
        assert self.status == 2
        assert self.out == ""
        (line,) = self.errors.splitlines()
        assert line.startswith("sidegate: ")
        return line


@pytest.fixture
def ask(shared: DaemonProcess) -> Callable[..., Done]:
    """Runs a command against the shared daemon."""
    return lambda *arguments: Done(*arguments, "--socket", shared.socket, "--timeout", "20")


Ask = Callable[..., Done]


def test_hit(ask: Ask) -> None:
    """hit exits 0 when admitted and 1 when refused, and says in words what is left."""
    for left in (2, 1, 0):
        done = ask("hit", "cli", "hit", *LIMIT)
        assert (done.status, done.errors) == (0, "")
        assert done.out == f"UNDER_LIMIT  {left} of 3 left, reset at {END}\n"
    done = ask("hit", "cli", "hit", *LIMIT)
    assert (done.status, done.errors) == (1, "")
    assert done.out == f"OVER_LIMIT  0 of 3 left, reset at {END}, retry after 60000 ms\n"


def test_hit_json(ask: Ask) -> None:
    """hit --json prints every field of the decision."""
    done = ask("hit", "cli", "hit-json", *LIMIT, "--hits", "3", "--json")
    assert done.status == 0
    assert done.data == {
        "allowed": True,
        "status": "UNDER_LIMIT",
        "limit": 3,
        "remaining": 0,
        "reset_time": END,
        "retry_after": 0,
        "owner": "test-node",
        "degraded": False,
        "error": "",
    }
    done = ask("hit", "cli", "hit-json", *LIMIT, "--json")
    assert done.status == 1
    assert (done.data["allowed"], done.data["status"], done.data["retry_after"]) == (False, "OVER_LIMIT", 60_000)


def test_hit_options(ask: Ask) -> None:
    """hit takes an algorithm, a burst, several hits, negative ones, and a window in words or in ms."""
    leaky = ("hit", "cli", "leaky", "--limit", "2", "--per", "1s", "--algorithm", "leaky", "--burst", "5", "--json")
    assert ask(*leaky, "--hits", "4").data["remaining"] == 1
    assert ask(*leaky, "--hits", "2").data["retry_after"] == 500
    assert ask("hit", "cli", "ms", "--limit", "2", "--per", "1500", "--json").data["reset_time"] == EPOCH + 1500
    month = ask("hit", "cli", "month", "--limit", "2", "--per", "calendar month", "--json").data
    assert month["reset_time"] == 1_701_388_799_999
    ask("hit", "cli", "back", *LIMIT, "--hits", "3")
    assert ask("hit", "cli", "back", *LIMIT, "--hits", "-2", "--json").data["remaining"] == 2


def test_peek(ask: Ask) -> None:
    """peek consumes nothing; it exits 1 when the limit is exhausted and a hit was refused."""
    for _ in range(2):
        done = ask("peek", "cli", "peek", *LIMIT)
        assert (done.status, done.out) == (0, f"UNDER_LIMIT  3 of 3 left, reset at {END}\n")
    ask("hit", "cli", "peek", *LIMIT, "--hits", "3")
    ask("hit", "cli", "peek", *LIMIT)
    done = ask("peek", "cli", "peek", *LIMIT, "--json")
    assert (done.status, done.data["status"]) == (1, "OVER_LIMIT")


def test_reset(ask: Ask) -> None:
    """reset forgets a bucket and says whether there was one; both exit 0."""
    ask("hit", "cli", "reset", *LIMIT)
    done = ask("reset", "cli", "reset")
    assert (done.status, done.out) == (0, "forgotten\n")
    done = ask("reset", "cli", "reset")
    assert (done.status, done.out) == (0, "there was no such bucket\n")
    assert ask("reset", "cli", "reset", "--json").data == {"existed": False}


def test_ping(ask: Ask) -> None:
    """ping prints the name of the node that answers."""
    done = ask("ping")
    assert (done.status, done.out, done.errors) == (0, "test-node\n", "")
    assert ask("ping", "--json").data == {"node": "test-node"}


def test_info(ask: Ask) -> None:
    """info prints what the daemon says of itself, a name and a value a line, or JSON."""
    done = ask("info")
    assert done.status == 0
    rows = dict(line.split(None, 1) for line in done.out.splitlines())
    assert rows["node"] == "test-node"
    assert rows["clock"] == "manual"
    assert {"version", "uptime_ms", "counters.buckets", "connections.open"} <= set(rows)
    data = ask("info", "--json").data
    assert data["node"] == "test-node"
    assert data["counters"]["buckets"] >= 0


def test_clock(daemon: DaemonProcess) -> None:
    """Clock advance and clock set move a manual clock and print the new time."""
    there = ("--socket", daemon.socket, "--timeout", "20")
    assert Done("clock", "advance", "1500", *there).out == f"{EPOCH + 1500}\n"
    assert Done("clock", "set", "1000", *there).out == "1000\n"
    assert Done("clock", "advance", "1", "--json", *there).data == {"now": 1001}
    assert "ms" in Done("clock", "advance", "-1", *there).refused()
    assert Done("clock", "set", "9000000000000000000", *there).refused()


def test_clock_on_the_real_clock(start_daemon: Callable[..., DaemonProcess]) -> None:
    """On a daemon with the system's clock, clock exits 2 and says how to start one that can be moved."""
    daemon = start_daemon(clock="system")
    done = Done("clock", "advance", "1", "--socket", daemon.socket, "--timeout", "20")
    assert "--clock manual" in done.refused()


def test_no_daemon(short_path: Path) -> None:
    """Without a daemon every command exits 2 with one line that names the path."""
    path = str(short_path / "none.sock")
    for words in (
        ("hit", "cli", "key", *LIMIT),
        ("peek", "cli", "key", *LIMIT),
        ("reset", "cli", "key"),
        ("ping",),
        ("info",),
        ("clock", "advance", "1"),
    ):
        assert path in Done(*words, "--socket", path).refused()


def test_a_daemon_that_hangs(short_path: Path) -> None:
    """A daemon that never answers costs --timeout seconds and exit status 2."""
    path = str(short_path / "hangs.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen(5)
        assert "in time" in Done("ping", "--socket", path, "--timeout", "0.1").refused()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("hit", "", "key", *LIMIT), "name"),
        (("hit", "cli", "", *LIMIT), "unique_key"),
        (("hit", "cli", "k" * 1025, *LIMIT), "1024"),
        (("hit", "cli", "key", "--limit", "-1", "--per", "1s"), "limit"),
        (("hit", "cli", "key", "--limit", "1" + "0" * 30, "--per", "1s"), "limit"),
        (("hit", "cli", "key", "--limit", "1", "--per", "soon"), "window"),
        (("hit", "cli", "key", "--limit", "1", "--per", ""), "window"),
        (("hit", "cli", "key", "--limit", "1", "--per", "-5"), "window"),
        (("hit", "cli", "key", "--limit", "1", "--per", "\u00b2"), "window"),
        (("hit", "cli", "key", "--limit", "1", "--per", "\u0663s"), "window"),
        (("hit", "cli", "key", "--limit", "1", "--per", "9" * 5000), ""),
        (("hit", "cli", "key", "--limit", "1", "--per", "9" * 5000 + "s"), ""),
        (("hit", "cli", "key", "--limit", "1", "--per", "calendar fortnight"), "window"),
        (("hit", "cli", "key", *LIMIT, "--burst", "-1"), "burst"),
        (("reset", "", "key"), "name"),
        (("ping", "--timeout", "0"), "timeout"),
        (("ping", "--timeout", "nan"), "timeout"),
        (("ping", "--socket", "tcp://localhost:1"), "unix:///path"),
        (("ping", "--socket", "/" + "x" * 200), "x" * 200),
    ],
)
def test_mistakes(words: tuple[str, ...], named: str) -> None:
    """A mistake exits 2 with one line that names what is wrong, without a traceback."""
    assert named in Done(*words).refused()


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("hti",),
        ("hit",),
        ("hit", "cli", "key"),
        ("hit", "cli", "key", "--limit", "many", "--per", "1s"),
        ("hit", "cli", "key", *LIMIT, "--algorithm", "fixed"),
        ("ping", "--unknown"),
        ("clock", "stop", "1"),
    ],
)
def test_misuse(words: tuple[str, ...]) -> None:
    """A command line that cannot be read exits 2 and shows the usage on stderr."""
    done = Done(*words)
    assert (done.status, done.out) == (2, "")
    assert done.errors.startswith("usage: ")


def test_output_into_a_closed_pipe(shared: DaemonProcess) -> None:
    """A reader that has gone away causes no traceback."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as out:
        done = subprocess.run(
            [sys.executable, "-m", "sidecar", "info", "--socket", shared.socket, "--timeout", "20"],
            env=clean_environment(),
            stdout=out,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    assert done.stderr == b""


# Settings


def test_config_defaults() -> None:
    """Config shows every setting with its value and that it is a default."""
    data = Done("config", "--json", TMPDIR="/nowhere").data
    assert data["max_buckets"] == {"value": "1000000", "source": "default"}
    assert data["max_connections"] == {"value": "4096", "source": "default"}
    assert data["socket_mode"] == {"value": "0660", "source": "default"}
    assert data["clock"] == {"value": "system", "source": "default"}
    assert {row["source"] for row in data.values()} == {"default"}
    text = Done("config").out
    for name in data:
        assert re.search(rf"^{name}\s", text, re.MULTILINE)


def test_config_precedence(short_path: Path) -> None:
    """An option wins over a variable, a variable over the file, the file over the default; each is named."""
    file = short_path / "sidegate.toml"
    file.write_text('grace = 1\nmax_frame = 2048\nnode = "from-file"\ntime_zone = "Europe/Rome"\n')
    variables = {"SIDEGATE_GRACE": "2", "SIDEGATE_MAX_FRAME": "4096", "SIDEGATE_LOG_LEVEL": "error"}
    options = ("--grace", "3", "--json")
    for done in (
        Done("config", "--config", str(file), *options, **variables),
        Done("config", *options, SIDEGATE_CONFIG=str(file), **variables),
    ):
        data = done.data
        assert data["grace"] == {"value": "3", "source": "option"}
        assert data["max_frame"] == {"value": "4096", "source": "SIDEGATE_MAX_FRAME"}
        assert data["log_level"] == {"value": "error", "source": "SIDEGATE_LOG_LEVEL"}
        assert data["node"] == {"value": "from-file", "source": str(file)}
        assert data["time_zone"] == {"value": "Europe/Rome", "source": str(file)}
        assert data["max_buckets"]["source"] == "default"


def test_config_socket_rule(short_path: Path) -> None:
    """The socket's path comes from the option, SIDEGATE_SOCKET, or the rule that clients follow too."""
    assert Done("config", "--json", SIDEGATE_SOCKET="unix:///a/b.sock").data["socket"] == {
        "value": "/a/b.sock",
        "source": "SIDEGATE_SOCKET",
    }
    assert Done("config", "--json", "--socket", "/c/d.sock", SIDEGATE_SOCKET="/a/b.sock").data["socket"] == {
        "value": "/c/d.sock",
        "source": "option",
    }
    told = Done("config", "--json", XDG_RUNTIME_DIR=str(short_path), TMPDIR=str(short_path)).data["socket"]["value"]
    client = subprocess.run(
        [sys.executable, "-c", "from sidecar.address import socket_path; print(socket_path())"],
        env=clean_environment(XDG_RUNTIME_DIR=str(short_path), TMPDIR=str(short_path)),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert told == client.stdout.strip()


def test_commands_find_the_daemon(shared: DaemonProcess) -> None:
    """SIDEGATE_SOCKET alone, as a path or a URL, lets a command find the daemon."""
    for named in (shared.socket, f"unix://{shared.socket}"):
        assert Done("ping", "--timeout", "20", SIDEGATE_SOCKET=named).out == "test-node\n"


@pytest.mark.parametrize(
    ("options", "variables", "named"),
    [
        (("--grace", "soon"), {}, "--grace"),
        (("--grace", "-1"), {}, "--grace"),
        (("--grace", "1" * 5000), {}, "--grace"),
        (("--max-buckets", "0"), {}, "--max-buckets"),
        (("--socket-mode", "0999"), {}, "--socket-mode"),
        (("--time-zone", "Europe/Atlantis"), {}, "--time-zone"),
        (("--time-zone", "../../etc/passwd"), {}, "--time-zone"),
        (("--clock", "manual"), {}, "--clock"),
        (("--clock", "manual:-5"), {}, "--clock"),
        (("--log-level", "loud"), {}, "--log-level"),
        (("--node", ""), {}, "--node"),
        (("--socket", ""), {}, "--socket"),
        ((), {"SIDEGATE_GRACE": "soon"}, "SIDEGATE_GRACE"),
        ((), {"SIDEGATE_GRAECE": "1"}, "SIDEGATE_GRAECE"),
        ((), {"SIDEGATE_grace": "1"}, "SIDEGATE_grace"),
        ((), {"SIDEGATE_CONFIG": "/no/such/file.toml"}, "/no/such/file.toml"),
        (("--config", "/"), {}, "/"),
    ],
)
@pytest.mark.parametrize("command", ["config", "serve"])
def test_bad_settings(command: str, options: tuple[str, ...], variables: dict[str, str], named: str) -> None:
    """A bad or unknown setting stops serve and config with one line that names it."""
    assert named in Done(command, *options, **variables).refused()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("grase = 1", "grase"),
        ("grace = true", "grace"),
        ("grace = 1.5", "grace"),
        ("grace = []", "grace"),
        ("grace = -1", "grace"),
        ("[server]\ngrace = 1", "server"),
        ("grace = ", "TOML"),
        ("node = ''", "node"),
    ],
)
def test_bad_files(short_path: Path, text: str, named: str) -> None:
    """A file with a bad or unknown setting stops the daemon with one line that names both."""
    file = short_path / "sidegate.toml"
    file.write_text(text)
    line = Done("serve", "--config", str(file)).refused()
    assert named in line
    assert str(file) in line


@pytest.mark.parametrize("value", ["0o660", "660", '"0660"'])
def test_a_mode_in_a_file(short_path: Path, value: str) -> None:
    """A socket_mode in a file means those permission bits however TOML lets it be written, or is refused."""
    file = short_path / "sidegate.toml"
    file.write_text(f"socket_mode = {value}\n")
    done = Done("config", "--json", "--config", str(file))
    if done.status:
        assert "socket_mode" in done.refused()
    else:
        assert done.data["socket_mode"]["value"] == "0660"


def test_a_near_miss_is_suggested() -> None:
    """A misspelt setting is told with the one it resembles."""
    assert "SIDEGATE_MAX_BUCKETS" in Done("config", SIDEGATE_MAX_BUKETS="5").refused()


def test_variables_that_are_no_settings_of_ours() -> None:
    """What Kubernetes sets beside a Service named sidegate, and empty variables, are no mistakes."""
    done = Done(
        "config",
        "--json",
        SIDEGATE_PORT="tcp://10.0.0.1:80",
        SIDEGATE_SERVICE_HOST="10.0.0.1",
        SIDEGATE_SERVICE_PORT="80",
        SIDEGATE_PORT_80_TCP="tcp://10.0.0.1:80",
        SIDEGATE_GRACE="",
    )
    assert done.status == 0
    assert done.data["grace"] == {"value": "5000", "source": "default"}


def test_help_of_settings() -> None:
    """The help of serve names each setting's unit, default and variable."""
    text = " ".join(Done("serve", "--help").out.split())
    for name in Done("config", "--json").data:
        assert f"--{name.replace('_', '-')} " in text
        assert f"SIDEGATE_{name.upper()}" in text
    for what in ("[ms] (default 5000)", "[buckets] (default 1000000)", "[bytes] (default 1048576)", "(default 0660)"):
        assert what in text


@pytest.mark.parametrize(
    ("command", "parts"),
    [
        ("hit", ("tokens per window", "ms", "default 1)", "default token", "seconds", "Exit 0 admitted, 1 refused")),
        ("peek", ("tokens per window", "ms", "default token", "seconds")),
        ("reset", ("NAME", "KEY", "seconds", "default 1")),
        ("ping", ("--socket", "seconds", "default 1")),
        ("info", ("--json", "seconds")),
        ("clock", ("milliseconds", "since the epoch", "seconds")),
        ("config", ("[ms]", "[buckets]", "default 1000000")),
    ],
)
def test_help_of_commands(command: str, parts: tuple[str, ...]) -> None:
    """Each command's help exits 0 and names units and defaults; the overview lists the command."""
    done = Done(command, "--help")
    assert (done.status, done.errors) == (0, "")
    text = " ".join(done.out.split())
    for part in parts:
        assert part in text
    assert f" {command} " in Done("--help").out


# --- Looking at a file of settings


def test_config_check_of_a_good_file(tmp_path: Path) -> None:
    """ok, and what SIGHUP could change of it; nothing is started, and no variable counts."""
    file = tmp_path / "settings.toml"
    file.write_text("log_level = 'debug'\nmax_buckets = 5\n")
    done = Done("config", "--check", str(file), SIDEGATE_GRACE="nonsense")
    assert (done.status, done.errors) == (0, "")
    assert done.out.splitlines() == ["ok", "SIGHUP changes: log_level", "needs a restart: max_buckets"]
    done = Done("config", "--check", str(file), "--json")
    assert done.data == {"ok": True, "sighup": ["log_level"], "restart": ["max_buckets"]}
    file.write_text("")
    assert Done("config", "--check", str(file)).out.splitlines()[0] == "ok"
    assert sorted(os.listdir(tmp_path)) == ["settings.toml"]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("grace = -1\n", "grace in {}: must be an integer from 0 to 600000, not '-1'"),
        ("graze = 1\n", "graze in {}: no such setting; did you mean grace?"),
        ("grace = [1]\n", "grace in {}: must be a string or an integer, not an array"),
        ("grace = " + "[" * 100_000, "{}: not TOML: nested too deep"),
        ("peers = '127.0.0.1:1'\nlisten = 'off'\n", "listen: a daemon with peers cannot have it off"),
        (None, "{}: No such file or directory"),
    ],
    ids=["range", "name", "type", "nested", "together", "none"],
)
def test_config_check_of_a_bad_file(tmp_path: Path, content: str | None, fault: str) -> None:
    """Exit status 2 and one line that names the fault."""
    file = tmp_path / "settings.toml"
    if content is not None:
        file.write_text(content)
    assert Done("config", "--check", str(file)).refused().startswith("sidegate: " + fault.format(file))


@pytest.mark.parametrize("option", ["--grace", "--config", "--log-level"])
def test_config_check_takes_no_other_setting(tmp_path: Path, option: str) -> None:
    """An option beside it would not count, and is refused rather than passed over."""
    line = Done("config", "--check", str(tmp_path), option, "5").refused()
    assert line == f"sidegate: --check looks at a file alone: leave out {option}"
