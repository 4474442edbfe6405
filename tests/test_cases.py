"""Sequences from public bug reports, with the answers that are right by docs/semantics.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sidecar.clock import ManualClock
from sidecar.messages import Algorithm, Verdict
from sidecar.service import Service
from sidecar.table import Table
from sidecar.wire import Op
from tests.helpers import O, U, call, decide, fields

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "cases" / "decisions.json").read_text())["cases"]
STATUS = {"U": U, "O": O}


def _request(case: dict[str, Any], step: dict[str, Any]) -> tuple[object, ...]:
    values = {name: {**case, **step}.get(name, 0) for name in ("hits", "limit", "duration", "behavior", "burst")}
    return fields(case["id"], "account:1", algorithm=int(Algorithm[case["algorithm"]]), **values)


def _check(case: dict[str, Any], number: int, step: dict[str, Any], verdict: Verdict) -> None:
    status, limit, remaining, reset_time, retry_after = verdict
    found = {
        "status": status,
        "limit": limit,
        "remaining": remaining,
        "reset": reset_time - case["T"],
        "retry_after": retry_after,
    }
    wanted = {name: step[name] for name in found if name in step}
    wanted["status"] = STATUS[step["status"]]
    wanted["limit"] = step.get("limit", case["limit"])
    assert {name: found[name] for name in wanted} == wanted, f"step {number} of {case['id']}: {step}"


def test_every_case_has_steps() -> None:
    """The file of cases is whole: none is empty and none stands twice."""
    assert len(CASES) == len({case["id"] for case in CASES}) >= 12
    assert all(case["steps"] for case in CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["id"]))
def test_a_table_gives_the_right_answers(case: dict[str, Any]) -> None:
    """Every step of a reported sequence is answered rightly by the table."""
    table = Table()
    for number, step in enumerate(case["steps"]):
        _check(case, number, step, decide(table, case["T"] + step["at"], _request(case, step)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["id"]))
def test_a_service_gives_the_right_answers(case: dict[str, Any]) -> None:
    """Every step of a reported sequence is answered rightly through frames, and its owner is told."""
    service = Service(Table(), ManualClock(case["T"]), "node-1", dict)
    for number, step in enumerate(case["steps"]):
        found = call(service, case["T"] + step["at"], Op.CHECK, [_request(case, step)])
        assert (found.outcome, found.node) == (0, "node-1")
        (verdict,) = found.payload
        _check(case, number, step, verdict)
