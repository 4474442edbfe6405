"""Malformed input: 100,000 seeded inputs, and arbitrary bytes by hypothesis."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import fuzz
from tests.daemons import DaemonProcess, running_daemon
from tests.sockets import frame

INPUTS = 100_000


@pytest.fixture(scope="module")
def shared() -> Iterator[DaemonProcess]:
    """The daemon that is fed; warmed up, so that what its memory grows by afterwards is growth."""
    with running_daemon(*fuzz.OPTIONS) as daemon:
        fuzz.run(daemon.socket, itertools.islice(fuzz.inputs(0), 2_000))
        yield daemon


def test_malformed_inputs(shared: DaemonProcess) -> None:
    """A daemon fed with 100,000 malformed inputs stays alive, correct, without a fault and of bounded memory."""
    memory = shared.memory()
    assert fuzz.run(shared.socket, itertools.islice(fuzz.inputs(1), INPUTS)) == INPUTS
    fuzz.examine(shared, memory)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


def framed(value: Any) -> bytes:
    """A value as a whole frame."""
    return frame(msgpack.packb(value))


inputs = (
    st.binary(max_size=200)
    | st.binary(max_size=200).map(frame)
    | values.map(framed)
    | st.tuples(st.just(1), st.integers(1, 9), st.integers(0, 6), values).map(framed)
    | st.tuples(st.just(1), st.just(7), st.just(1), st.lists(st.lists(values, min_size=5, max_size=9))).map(framed)
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.lists(inputs, min_size=1, max_size=8))
def test_arbitrary_bytes(shared: DaemonProcess, data: list[bytes]) -> None:
    """Whatever bytes come, the daemon answers whole frames, ends the stream and logs no fault of its own."""
    fuzz.feed(shared.socket, data)
    assert shared.process.poll() is None


def test_the_inputs_are_the_same_for_the_same_seed() -> None:
    """A failure can be shown again from its seed."""
    first = list(itertools.islice(fuzz.inputs(7), 1_000))
    assert first == list(itertools.islice(fuzz.inputs(7), 1_000))
    assert len(set(first)) > 900
