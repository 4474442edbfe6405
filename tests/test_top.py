"""`sidegate top`: its numbers, its layout, and the whole of it in a real terminal."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sidecar import Client, Limit
from sidecar.rates import view
from sidecar.top import Page, clean, count, length, rate, trip
from tests.clusters import Cluster
from tests.daemons import DaemonProcess, clean_environment, wait_until

PER_HOUR = Limit("logins", 5, per="1h")


def answered(**more: Any) -> dict[str, Any]:
    """An answer to TOP, as the client gives it."""
    counters = {"under_limit": 0, "over_limit": 0, "errors": 0, "buckets": 3, "evicted": 0, "evicted_exhausted": 0}
    return {
        "node": "node-1",
        "version": "9.9",
        "pid": 7,
        "uptime_ms": 1_000,
        "now": 1_000_000,
        "counters": counters | more.pop("counters", {}),
        "max_buckets": 10,
        "memory": 1 << 20,
        "connections": {"open": 2},
        "cluster": {},
        "hot": None,
        **more,
    }


def linked(forwarded: int, requests: int, state: str = "connected") -> dict[str, Any]:
    """What a daemon with one peer says of its cluster."""
    peer = {"name": "b", "address": "b:1", "state": state, "queued": 4, "requests": requests}
    return {"forwarded": forwarded, "fallbacks": 0, "peers": [{**peer, "p50_us": 310, "p99_us": 2_400}]}


# --- Rates


def test_rates_are_differences_by_the_daemons_own_time() -> None:
    """Each rate is what a counter grew by, over the uptime that passed between the two answers."""
    before = answered(counters={"under_limit": 100, "over_limit": 10}, cluster=linked(40, 400))
    after = answered(
        uptime_ms=3_000,
        counters={"under_limit": 130, "over_limit": 20, "errors": 10, "evicted": 1, "evicted_exhausted": 3},
        cluster=linked(60, 500),
    )
    found = view(before, after)
    assert found["interval_ms"] == 2_000
    assert found["per_second"] == {
        "decisions": 25,
        "under_limit": 15,
        "over_limit": 5,
        "errors": 5,
        "forwarded": 10,
        "fallbacks": 0,
        "evicted": 2,
    }
    assert found["over_limit_share"] == 0.2
    assert found["peers"][0]["requests_per_second"] == 50


@pytest.mark.parametrize("before", [None, answered(pid=8), answered(uptime_ms=9_000), answered()])
def test_no_rate_without_an_earlier_answer_of_the_same_run(before: dict[str, Any] | None) -> None:
    """The first look, one after a restart, and one at the same moment have no rates, rather than wrong ones."""
    found = view(before, answered(cluster=linked(5, 50)))
    assert found["interval_ms"] is None
    assert set(found["per_second"].values()) == {None}
    assert found["over_limit_share"] is None
    assert found["peers"][0]["requests_per_second"] is None


def test_a_counter_that_began_anew() -> None:
    """A counter lower than before (a new ring's) has grown from nothing."""
    found = view(answered(cluster=linked(900, 900)), answered(uptime_ms=2_000, cluster=linked(7, 8)))
    assert found["per_second"]["forwarded"] == 7
    assert found["peers"][0]["requests_per_second"] == 8


def hot(*keys: tuple[Any, ...]) -> dict[str, Any]:
    """What a daemon says of hot keys."""
    return {"window_ms": 10_000, "every": 32, "requests": 64, "names": [("n", 64, 64)], "keys": keys}


def test_hot_keys_come_with_a_rate_and_what_is_left() -> None:
    """A key's rate is over the window it was counted in; one whose bucket is gone has nothing left and no limit."""
    found = view(None, answered(hot=hot(("n", "k", 40, 72, (1, 5, 0, 1_002_500)), ("n", "gone", 20, 20, None))))["hot"]
    held, gone = found["keys"]
    assert (held["per_second"], held["at_least"], held["at_most"]) == (4, 40, 72)
    assert (held["over_limit"], held["limit"], held["remaining"], held["reset_in_ms"]) == (True, 5, 0, 2_500)
    assert (gone["over_limit"], gone["limit"], gone["remaining"], gone["reset_in_ms"]) == (None,) * 4


# --- Layout


def drawn(page: Page, width: int, height: int) -> list[str]:
    """The page's lines as a screen of that size gets them."""
    out = io.StringIO()
    Console(file=out, width=width, height=height, highlight=False, force_terminal=False).print(page)
    return out.getvalue().splitlines()


def full(keys: int = 40, peers: int = 12) -> dict[str, Any]:
    """A view with more of everything than a screen holds."""
    told = hot(
        *(("n" * 60, f"account:{number}" + "x" * 90, 90, 90, (0, 2**62, 2**61, 2**50)) for number in range(keys))
    )
    told["names"] = [(f"limit-{number}", 9, 9) for number in range(30)]
    cluster = linked(1, 1)
    cluster["peers"] = [
        {**cluster["peers"][0], "name": f"peer-{number}", "state": "away" if number == peers - 1 else "connected"}
        for number in range(peers)
    ]
    return view(None, answered(hot=told, cluster=cluster))


@pytest.mark.parametrize(
    ("width", "height"), [(200, 60), (100, 30), (80, 24), (60, 20), (50, 15), (34, 12), (20, 5), (1, 1)]
)
def test_the_page_fits_the_screen(width: int, height: int) -> None:
    """Whatever there is to tell, no line and no page is larger than the screen."""
    page = Page(full(), drawn=True)
    page.away = "no daemon at " + "/long" * 40
    for lines in (drawn(Page(full(), drawn=True), width, height), drawn(page, width, height)):
        assert len(lines) <= height
        assert all(len(line) <= width for line in lines)


def test_a_screen_of_80_by_24_holds_something_of_each() -> None:
    """On the smallest usual terminal there are keys, names, peers (who is away first) and the way out."""
    text = "\n".join(drawn(Page(full(), drawn=True), 80, 24))
    for word in ("HOTTEST NAMES", "limit-0", "HOTTEST KEYS", "account:4", "PEERS", "peer-11", "away", "q quits"):
        assert word in text


def test_small_screens_keep_keys_longest() -> None:
    """Where there is room for one table, it is the keys'."""
    text = "\n".join(drawn(Page(full(), drawn=True), 80, 10))
    assert "HOTTEST KEYS" in text
    assert "NAMES" not in text
    assert "PEERS" not in text


def test_a_key_cannot_command_the_terminal() -> None:
    """Control sequences in a key, a name or a reason are shown as boxes, and markup as it stands."""
    evil = "\x1b]0;owned\x07\x1b[2J[bold red]k\n\u202e"
    page = Page(view(None, answered(node=evil, hot=hot((evil, evil, 9, 9, None)))), drawn=True)
    page.away = evil
    text = "\n".join(drawn(page, 200, 40))
    assert not set(text) & {"\x1b", "\x07", "\u202e"}
    assert text.count("[2J[bold red]k") == 3  # the reason, the node, the key; the name is cut


def test_without_hot_keys_the_page_says_so() -> None:
    """With hot_keys 0 there is no table of keys, and the reason stands below."""
    assert any("not counted" in line for line in drawn(Page(view(None, answered()), drawn=True), 80, 24))


@pytest.mark.parametrize(
    ("told", "text"),
    [
        (rate(None), "-"),
        (rate(0.0), "0"),
        (rate(0.04), "0.0"),
        (rate(9.94), "9.9"),
        (rate(9.95), "10"),
        (rate(12_345.6), "12,346"),
        (count(999_999_999), "999,999,999"),
        (count(2**63 - 1), "9.22e18"),
        (length(0), "0 ms"),
        (length(999), "999 ms"),
        (length(59_999), "59 s"),
        (length(60_000), "1 min"),
        (length(3_599_000), "59 min 59 s"),
        (length(86_399_000), "23 h 59 min"),
        (length(90_000_000), "1 d 1 h"),
        (trip(None), "-"),
        (trip(999), "999 us"),
        (trip(1_250), "1.2 ms"),
        (clean("\N{SNOWMAN} a\tb"), "\N{SNOWMAN} a\N{REPLACEMENT CHARACTER}b"),
    ],
)
def test_numbers_in_few_letters(told: str, text: str) -> None:
    """How numbers, times and texts are written."""
    assert told == text


# --- The command


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """The command's end, without a terminal."""
    return subprocess.run(
        [sys.executable, "-m", "sidecar", "top", *words],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def load(short_path: Path) -> Iterator[Callable[[str], None]]:
    """Asks a daemon for account:7, again and again, until the test ends."""
    stop = threading.Event()
    threads: list[threading.Thread] = []

    def ask(path: str) -> None:
        with Client(path, timeout=5, on_error="allow") as client:
            while not stop.wait(0.01):
                client.check([PER_HOUR.request("account:7", 1)] * 50)

    def start(path: str) -> None:
        threads.append(threading.Thread(target=ask, args=(path,)))
        threads[-1].start()

    yield start
    stop.set()
    for thread in threads:
        thread.join()


def heated(daemon: DaemonProcess) -> None:
    """Wait until the daemon has counted a hot key."""
    with daemon.client() as client:
        wait_until(lambda: (client.top()["hot"] or {"keys": True})["keys"], "a key is hot")


def test_once_json(daemon: DaemonProcess, load: Callable[[str], None]) -> None:
    """--once --json prints one view: rates of the interval, the hot key with what is left of it, memory, uptime."""
    load(daemon.socket)
    heated(daemon)
    done = run("--once", "--json", "--interval", "0.5", "--socket", daemon.socket, "--timeout", "20")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["node"] == "test-node"
    assert found["interval_ms"] >= 500
    assert found["per_second"]["decisions"] > 0
    assert found["over_limit_share"] > 0.5
    assert abs(found["memory"] - daemon.memory()) < 32 << 20
    (key,) = found["hot"]["keys"]
    assert (key["name"], key["key"], key["limit"], key["remaining"], key["over_limit"]) == (
        "logins",
        "account:7",
        5,
        0,
        True,
    )
    assert key["reset_in_ms"] == 3_600_000
    assert found["hot"]["requests"] >= key["at_least"] > 0


def test_once_in_words(daemon: DaemonProcess, load: Callable[[str], None]) -> None:
    """--once prints the same for a reader, and no control sequence into a pipe."""
    load(daemon.socket)
    heated(daemon)
    done = run("--once", "--interval", "0.1", "--socket", daemon.socket, "--timeout", "20")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert "test-node" in done.stdout
    assert re.search(r"account:7 +logins +[\d,.]+ +0 +5 +1 h", done.stdout)


def test_hot_keys_switched_off(start_daemon: Callable[..., DaemonProcess]) -> None:
    """With hot_keys 0 none are counted, and all else is told."""
    daemon = start_daemon("--hot-keys", "0")
    found = json.loads(run("--once", "--json", "--interval", "0.1", "--socket", daemon.socket).stdout)
    assert found["hot"] is None
    assert found["buckets"] == 0


def test_peers_have_round_trips(start_cluster: Callable[..., Cluster]) -> None:
    """A peer that was asked has its state and what its batches took, p50 and p99; one not asked yet has none."""
    cluster = start_cluster(2)
    node, other = cluster.nodes
    assert node.link(other)["p50_us"] is None
    cluster.connect(PER_HOUR)
    (key,) = cluster.keys(other, 1, PER_HOUR.name)
    for _ in range(5):
        node.ask(PER_HOUR, key)
    with node.client() as client:
        found = view(None, client.top())
    states = {peer["name"]: peer for peer in found["peers"]}
    assert states[node.peer.name]["state"] == "self"
    asked = states[other.peer.name]
    assert asked["state"] == "connected"
    assert 0 < asked["p50_us"] <= asked["p99_us"] < 60_000_000


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--json",), "--once"),
        (("--once", "--interval", "0"), "--interval"),
        (("--once", "--interval", "nan"), "--interval"),
        ((), "terminal"),
        (("--once", "--socket", "/nowhere/sidegate.sock"), "/nowhere"),
        (("--once", "--json", "--socket", "/nowhere/sidegate.sock"), "/nowhere"),
    ],
)
def test_what_cannot_be_done_is_one_line(words: tuple[str, ...], named: str) -> None:
    """Options that do not go together, no terminal, no daemon: exit status 2 and one line that says which."""
    done = run(*words)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("sidegate: ")
    assert named in line


# --- In a terminal


class Terminal:
    """A real terminal: tmux on a socket of its own, with a shell that types no prompt of its own."""

    def __init__(self, folder: Path, width: int = 100, height: int = 30) -> None:
        self._tmux = ["tmux", "-S", str(folder / "tmux"), "-f", "/dev/null"]
        environment = clean_environment(PS1="$ ", LANG="C.UTF-8", TERM="xterm-256color")
        # A session of the developer's own, and the size that a test runner says its terminal has.
        for name in ("TMUX", "COLUMNS", "LINES"):
            environment.pop(name, None)
        size = ("-x", str(width), "-y", str(height))
        subprocess.run([*self._tmux, "new-session", "-d", *size, "sh"], env=environment, check=True, timeout=30)

    def _say(self, *words: str) -> str:
        done = subprocess.run([*self._tmux, *words], capture_output=True, text=True, check=True, timeout=30)
        return done.stdout

    def type(self, *keys: str) -> None:
        """Press keys, by tmux's names."""
        self._say("send-keys", *keys)

    def run(self, *words: str) -> None:
        """Type a command that tells its exit status when it ends."""
        self.type("-l", shlex.join([sys.executable, "-m", "sidecar", "top", *words]) + "; echo ended=$?")
        self.type("Enter")

    def resize(self, width: int, height: int) -> None:
        """Change the window's size."""
        self._say("resize-window", "-x", str(width), "-y", str(height))

    @property
    def screen(self) -> str:
        return self._say("capture-pane", "-p")

    def shows(self, *texts: str) -> None:
        """Wait until the screen shows all of these."""
        try:
            wait_until(lambda: all(text in self.screen for text in texts), f"the screen shows {texts}")
        except AssertionError as error:
            raise AssertionError(f"{error}; it shows:\n{self.screen}") from None

    def restored(self, status: int) -> None:
        """The command has ended with this status, and the terminal is as it was."""
        self.shows(f"ended={status}")
        modes = self._say("display-message", "-p", "#{alternate_on} #{cursor_flag} #{mouse_any_flag}")
        assert modes == "0 1 0\n"
        self.type("-l", "stty -a")
        self.type("Enter")
        self.shows(" icanon", " echo ", "susp = ^Z")

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], check=False, timeout=30, capture_output=True)


@pytest.fixture
def terminal(short_path: Path) -> Iterator[Terminal]:
    """A terminal of 100 x 30."""
    if shutil.which("tmux") is None:
        if os.environ.get("CI"):
            pytest.fail("tmux is missing, which .ci/run installs")
        pytest.skip("tmux is not installed")
    opened = Terminal(short_path)
    yield opened
    opened.close()


def test_q_ends_it(daemon: DaemonProcess, load: Callable[[str], None], terminal: Terminal) -> None:
    """The live view shows the hot key, is refreshed, follows the window's size, and q leaves the terminal as it was."""
    load(daemon.socket)
    terminal.run("--interval", "0.2", "--socket", daemon.socket)
    terminal.shows("test-node", "HOTTEST NAMES", "HOTTEST KEYS", "account:7", "OF LIMIT", "q quits")
    wait_until(lambda: re.search(r"[1-9][\d,.]* owned decisions/s", terminal.screen), "a rate is drawn")
    terminal.resize(44, 14)
    wait_until(lambda: "OF LIMIT" not in terminal.screen and "account:7" in terminal.screen, "it is drawn anew")
    terminal.resize(80, 24)
    terminal.shows("OF LIMIT", "q quits")
    terminal.type("x", "C-z")
    terminal.type("q")
    terminal.restored(0)


def test_ctrl_c_ends_it(daemon: DaemonProcess, terminal: Terminal) -> None:
    """So does Ctrl-C, during a long interval too."""
    terminal.run("--interval", "600", "--socket", daemon.socket)
    terminal.shows("test-node", "q quits")
    terminal.type("C-c")
    terminal.restored(0)


def test_sigterm_ends_it(daemon: DaemonProcess, terminal: Terminal, short_path: Path) -> None:
    """SIGTERM ends it with status 143, the terminal as it was."""
    pid = short_path / "pid"
    words = [sys.executable, "-m", "sidecar", "top", "--interval", "600", "--socket", daemon.socket]
    # The shell becomes the command, so that its own process id is the one to signal.
    terminal.type("-l", f"sh -c {shlex.quote(f'echo $$ > {pid}; exec {shlex.join(words)}')}; echo ended=$?")
    terminal.type("Enter")
    terminal.shows("test-node", "q quits")
    os.kill(int(pid.read_text()), signal.SIGTERM)
    terminal.restored(143)


def test_a_daemon_that_goes_away_is_found_again(daemon: DaemonProcess, terminal: Terminal) -> None:
    """A daemon that ends is shown as away, with the reason and what was last known, and is found again."""
    terminal.run("--interval", "0.2", "--socket", daemon.socket)
    terminal.shows("test-node", "q quits")
    daemon.stop()
    terminal.shows("away", "no daemon at", "test-node")
    daemon.start()
    wait_until(lambda: "away" not in terminal.screen and "test-node" in terminal.screen, "it is found again")
    terminal.type("q")
    terminal.restored(0)


def test_it_may_be_started_before_the_daemon(daemon: DaemonProcess, terminal: Terminal) -> None:
    """Without a daemon the live view waits for one."""
    daemon.stop()
    terminal.run("--interval", "0.2", "--socket", daemon.socket)
    terminal.shows("away", "no daemon at")
    daemon.start()
    terminal.shows("test-node")
    terminal.type("q")
    terminal.restored(0)
