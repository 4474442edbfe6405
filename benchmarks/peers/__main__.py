"""`python -m benchmarks.peers`: measure side by side, and write the records, the tables and the charts.

Decides what is run and where the results go: peers.json (every record) and peers.md, written anew after each
scene, so that a run that is stopped keeps what it has, and the PNG files at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import charts
from benchmarks.peers.bench import Bench
from benchmarks.peers.contenders import CONTENDERS
from benchmarks.peers.machine import machine, versions
from benchmarks.peers.report import markdown
from benchmarks.peers.scenes import CLUSTERED, NODES, SCENES
from benchmarks.peers.systems import missing

_RESULTS = "benchmarks/results"
_PART_RESULTS = "build/bench-peers"
"""Of quick runs and of parts, so that these never take the place of a whole run's."""


def main() -> int:
    """Run what was asked for; the exit status."""
    options = _options()
    if options.report:
        facts, records = _merged([json.loads(path.read_text()) for path in options.report])
        _write(options.out, facts, records)
        charts.charts(records, options.out)
        return 0
    contenders = [CONTENDERS[name] for name in options.contenders]
    nodes = NODES if CLUSTERED.intersection(options.scenes) else 1
    absent = {why for one in contenders if (why := missing(one.system, nodes))}
    if absent:
        print("\n".join(sorted(absent)), "or leave them out with --contenders and --scenes", sep="\n", file=sys.stderr)
        return 2
    # Ended from outside as by Ctrl-C: every process that was started is ended on the way out.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="sgp-") as folder:
        bench = Bench(
            contenders=contenders,
            rounds=options.rounds,
            seconds=options.seconds,
            hold=options.hold,
            keys=(options.keys // 10, options.keys),
            folder=Path(folder),
            note=lambda text: print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True),
        )
        facts = {
            "machine": machine(),
            "versions": versions({one.system for one in contenders}),
            "load": os.getloadavg()[0],
            "began": _now(),
            "rounds": bench.rounds,
            "seconds": bench.seconds,
            "hold": bench.hold,
            "keys": bench.keys,
            "quick": options.quick,
        }
        done: list[dict[str, Any]] = []
        try:
            for number in options.scenes:
                SCENES[number](bench)
                done = list(bench.records)
                _write(options.out, {**facts, "ended": _now()}, done)
        except KeyboardInterrupt:
            print("stopped; the scene that was not finished is not in the results", file=sys.stderr)
            return 130
        finally:
            charts.charts(done, options.out)
    print((options.out / "peers.md").read_text())
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    numbers = ",".join(map(str, SCENES))
    parser.add_argument("--scenes", type=_scenes, default=list(SCENES), help=f"of {numbers} (default all)")
    parser.add_argument("--contenders", type=_contenders, default=list(CONTENDERS), help=f"of {','.join(CONTENDERS)}")
    parser.add_argument("--rounds", type=int, help="rounds of each comparison (default 5)")
    parser.add_argument("--seconds", type=float, help="seconds of one measurement (default 1)")
    parser.add_argument("--hold", type=float, help="seconds for which scene 9 holds its rate (default 60)")
    parser.add_argument("--keys", type=int, help="live keys in scene 7, after a tenth of them (default 1,000,000)")
    parser.add_argument("--quick", action="store_true", help="prove that all works; measures nothing worth keeping")
    parser.add_argument("--out", type=Path, help=f"folder (default {_RESULTS}; of a part or quick, {_PART_RESULTS})")
    parser.add_argument(
        "--report", type=Path, nargs="+", metavar="JSON", help="measure nothing: write tables and charts of these runs"
    )
    options = parser.parse_args()
    usual = {"rounds": 5, "seconds": 1.0, "hold": 60.0, "keys": 1_000_000}
    quick = {"rounds": 1, "seconds": 0.2, "hold": 1.0, "keys": 20_000}
    for name, value in (quick if options.quick else usual).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    whole = not options.quick and set(options.scenes) == set(SCENES) and set(options.contenders) == set(CONTENDERS)
    options.out = options.out or Path(_RESULTS if whole and not options.report else _PART_RESULTS)
    if options.rounds < 1 or options.seconds <= 0 or options.hold <= 0 or options.keys < 10_000:
        parser.error("rounds, seconds and hold are above 0, keys at least 10,000")
    return options


def _scenes(text: str) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = [0]
    if not set(numbers) <= set(SCENES):
        raise argparse.ArgumentTypeError(f"scenes are numbers of {min(SCENES)} to {max(SCENES)}, comma separated")
    return numbers


def _contenders(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in CONTENDERS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown {unknown[0]!r}; contenders are {', '.join(CONTENDERS)}")
    return names


def _merged(runs: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Several runs as one: of a scene that several have, the last one's records; the machine as the last found it."""
    scenes: dict[int, list[dict[str, Any]]] = {}
    for run in runs:
        for scene in {one["scene"] for one in run["records"]}:
            scenes[scene] = [one for one in run["records"] if one["scene"] == scene]
    facts = {**runs[-1]["facts"], "began": runs[0]["facts"]["began"]}
    return facts, [one for scene in sorted(scenes) for one in scenes[scene]]


def _write(folder: Path, facts: dict[str, Any], records: Sequence[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "peers.json").write_text(json.dumps({"facts": facts, "records": records}, indent=1) + "\n")
    (folder / "peers.md").write_text(markdown(facts, records))


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())


if __name__ == "__main__":
    sys.exit(main())
