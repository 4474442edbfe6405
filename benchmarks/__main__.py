"""`python -m benchmarks`: measure, and print every figure beside its target."""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
from itertools import chain
from pathlib import Path

from benchmarks.hot_keys import hot_keys
from benchmarks.linked import link
from benchmarks.one_host import figures
from benchmarks.others import Others


def main() -> None:
    """Print the machine and a Markdown table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each comparison (default 7)")
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds of each run (default 1)")
    options = parser.parse_args()
    print(f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, {os.cpu_count()} cores\n")
    print("| figure | measured | target | met | in numbers |\n|---|---|---|---|---|")
    others = Others()
    linked = link(Path(tempfile.mkdtemp(prefix="sgb-")), options.rounds, options.seconds)
    for figure in chain(figures(options.rounds, options.seconds), [hot_keys(options.rounds)], linked):
        bound = f"{'>=' if figure.at_least else '<='} {figure.target:g} {figure.unit}"
        met = "yes" if figure.met else "**missed**"
        print(f"| {figure.name} | {figure.value:.3g} {figure.unit} | {bound} | {met} | {figure.detail} |", flush=True)
    print(f"\nOther processes and interrupts took {others.share():.1%} of the machine's CPU time meanwhile.")


if __name__ == "__main__":
    main()
