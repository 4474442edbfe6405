"""What counting hot keys costs: the same known one-hit frames, answered by a node that counts and by one that does not.

Decides the figure `hot keys`: no socket, so that what is compared is the deciding alone, where counting weighs most.
"""

from __future__ import annotations

import random
import statistics
import time

from benchmarks.load import LIMIT, NAME, WINDOW
from benchmarks.one_host import Figure
from sidecar.clock import SystemClock
from sidecar.hot import HotKeys
from sidecar.service import Service
from sidecar.table import Table
from sidecar.wire import Op, Packer

_FRAMES, _KEYS = 100_000, 800


class _Nobody:
    gone = False

    def send(self, data: bytes) -> None:
        """Nothing here is decided elsewhere."""


class _Node:
    """A node that has answered each frame once."""

    def __init__(self, hot_keys: int) -> None:
        clock = SystemClock()
        self._now, self._asker = clock.now(), _Nobody()
        self._service = Service(Table(), clock, "node", dict)
        if hot_keys:
            hot = HotKeys(hot_keys, time.monotonic(), random.random)
            self._service.count_hot(hot, time.monotonic)
        requests = [(NAME, f"account:{number}", 1, LIMIT, WINDOW, 0, 0, 0, None) for number in range(_KEYS)]
        self._frames = [Packer().request(1, Op.CHECK, [request]) for request in requests]
        for data in self._frames:
            self._service.answer(data[4:], self._now, self._asker)

    def seconds(self) -> float:
        """CPU time of answering them again and again."""
        answer_again, now, asker = self._service.answer_again, self._now, self._asker
        began = time.process_time()
        for _ in range(_FRAMES // _KEYS):
            for data in self._frames:
                answer_again(data, now, asker)
        return time.process_time() - began


def hot_keys(rounds: int) -> Figure:
    """The rate with the default of 64 hot keys, of the rate without."""
    counting, plain = _Node(64), _Node(0)
    pairs = [(plain.seconds(), counting.seconds()) for _ in range(rounds * 5)]
    return Figure(
        "known frames answered while hot keys are counted, of without",
        statistics.median(without / with_them for without, with_them in pairs),
        0.95,
        "x",
        True,
        f"{_FRAMES / statistics.median(with_them for _, with_them in pairs):,.0f}/s of CPU time, no socket",
    )
