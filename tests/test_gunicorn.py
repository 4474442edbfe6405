"""The example of a web application in docs/, under a real gunicorn that forks its workers."""

from __future__ import annotations

import http.client
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemons import DaemonProcess, clean_environment, wait_until

DOCS = Path(__file__).parent.parent / "docs"
WORKERS = 4
LIMIT = 100

# A busy test machine may take longer to answer than a web application would wait.  The control socket is a
# thing of newer gunicorns, which would leave it in the user's home.
SETTINGS = """
import sidecar.client

sidecar.client.DEFAULT_TIMEOUT = 30.0
control_socket_disable = True
"""


@pytest.fixture
def port(daemon: DaemonProcess, short_path: Path) -> Iterator[int]:
    """The loopback port of a gunicorn with four workers, forked after the application was loaded."""
    log = short_path / "gunicorn.log"
    settings = short_path / "settings.py"
    settings.write_text(SETTINGS)
    with log.open("wb") as out:
        gunicorn = subprocess.Popen(
            [
                *(sys.executable, "-m", "gunicorn", "-c", str(settings), "-b", "127.0.0.1:0", "--preload"),
                *("-w", str(WORKERS), "--chdir", str(DOCS), "gunicorn_app:app"),
            ],
            env=clean_environment(SIDEGATE_SOCKET=daemon.socket),
            stdout=out,
            stderr=subprocess.STDOUT,
        )

    def booted() -> bool:
        assert gunicorn.poll() is None, log.read_text()
        return log.read_text().count("Booting worker") == WORKERS

    try:
        wait_until(booted, "gunicorn's workers are up", 60)
        found = re.search(r"Listening at: http://127\.0\.0\.1:(\d+)", log.read_text())
        assert found, log.read_text()
        yield int(found[1])
    finally:
        gunicorn.send_signal(signal.SIGTERM)
        try:
            gunicorn.wait(30)
        except subprocess.TimeoutExpired:
            gunicorn.kill()
            gunicorn.wait()


def test_four_workers_admit_the_limit_between_them(daemon: DaemonProcess, port: int) -> None:
    """Of concurrent requests over the limit the workers admit exactly the limit, whichever of them is asked."""
    statuses: Counter[int] = Counter()

    def ask(count: int) -> None:
        for _ in range(count):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("GET", "/")
            statuses[connection.getresponse().status] += 1
            connection.close()

    threads = [threading.Thread(target=ask, args=(25,)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == {200: LIMIT, 429: 16 * 25 - LIMIT}
    # Several workers were at it, each over a connection of its own.
    assert daemon.connections()["open"] > 2
    # The window ends for all of them.
    with daemon.client() as client:
        client.advance_clock(60_000)
    ask(1)
    assert statuses[200] == LIMIT + 1
