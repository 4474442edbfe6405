"""The records as Markdown: targets met and missed, and a table a scene.

Decides what a reader sees of them; every figure is a median over rounds.  Makes no number of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.peers.arithmetic import MOST_LATE, Record, chosen, highest_rate, median
from benchmarks.peers.contenders import CONTENDERS
from benchmarks.peers.targets import verdicts

TITLES = {
    1: "One worker, one hit a call",
    2: "8 workers, one hit a call",
    3: "8 workers, 2 limits a call",
    4: "One worker, batches",
    5: "Three nodes, random keys, 8 workers on one node",
    6: "One hot key from 8 workers",
    7: "Many live keys",
    8: "Abuse: 95 of 100 hits over their limit, 8 workers",
    9: "8 workers at 70 % of each system's own maximum",
    10: "How long a call takes at which rate, 8 workers; three nodes, of which one is asked",
}
_FIELDS = {"rate": "decisions/s", "p50": "p50", "worker_cpu": "workers' CPU a decision"}
_COLUMNS = {
    "decisions/s": ("rate", "{:,.0f}"),
    "p50 us": ("p50", "{:,.0f}"),
    "p99 us": ("p99", "{:,.0f}"),
    "p99.9 us": ("p999", "{:,.0f}"),
    "worst ms": ("worst", "{:,.1f}"),
    "bytes a key": ("bucket", "{:,.0f}"),
    "keys the asked node owns": ("owned", "{:.0%}"),
    "workers' CPU s a million": ("worker_cpu", "{:,.1f}"),
    "servers' CPU s a million": ("server_cpu", "{:,.1f}"),
    "others' cores": ("others", "{:.2f}"),
}


def markdown(facts: Mapping[str, Any], records: Sequence[Record]) -> str:
    """The whole page."""
    lines = [*_machine(facts, records), "", *_targets(records)]
    for scene in sorted({one["scene"] for one in records}):
        lines += ["", f"### {scene}. {TITLES[scene]}", ""]
        lines += _rates(records) if scene == 10 else _scene(chosen(records, scene=scene))
    return "\n".join(lines) + "\n"


def _machine(facts: Mapping[str, Any], records: Sequence[Record]) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    loads = sorted(one["load"] for one in records)
    yield f"Machine: {facts['machine']}. {versions}. {facts['began']} to {facts['ended']}."
    yield ""
    yield (
        f"Load average at the start {facts['load']:.2f}; while measuring (this benchmark's own work in it) "
        f'{loads[0]:.2f} to {loads[-1]:.2f}. "Others\' cores" is what the rest of the machine used meanwhile, '
        "the kernel's interrupts among it."
        if records
        else f"Load average at the start {facts['load']:.2f}."
    )
    yield ""
    yield (
        f"{facts['rounds']} rounds of {facts['seconds']:g} s; scene 9 held for {facts['hold']:g} s; scene 7 with "
        f"{' and '.join(f'{count:,}' for count in facts['keys'])} keys."
        + (" **A quick run: it proves that all works and measures nothing.**" if facts["quick"] else "")
    )


def _targets(records: Sequence[Record]) -> Iterator[str]:
    yield "| scene | Sidegate's Client, against | figure | ratio (all rounds) | target | met |"
    yield "|---|---|---|---|---|---|"
    for target, ratio, every in verdicts(records):
        met = ratio >= target.bound if target.at_least else ratio <= target.bound
        bound = f"{'>=' if target.at_least else '<='} {target.bound:g}"
        theirs = CONTENDERS[target.theirs].title
        spread = f"{min(every):.3g} to {max(every):.3g}"
        yield (
            f"| {target.scene} | {theirs} | {_FIELDS[target.field]} | {ratio:.3g} ({spread}) | {bound} | "
            f"{'yes' if met else '**missed**'} |"
        )


def _scene(records: Sequence[Record]) -> Iterator[str]:
    shown = {head: how for head, how in _COLUMNS.items() if any(one.get(how[0]) is not None for one in records)}
    yield f"| contender | {' | '.join(shown)} |"
    yield "|---" * (len(shown) + 1) + "|"
    for case in dict.fromkeys(one["case"] for one in records):
        for contender in dict.fromkeys(one["contender"] for one in records):
            those = chosen(records, case=case, contender=contender)
            if those:
                title = CONTENDERS[contender].title + (f", {case}" if case else "")
                cells = [_cell(those, *how) for how in shown.values()]
                yield f"| {title} | {' | '.join(cells)} |"


def _cell(records: Sequence[Record], field: str, form: str) -> str:
    value = median(records, field)
    if value is None:
        return ""
    return form.format(value / 1000 if field == "worst" else value)


def _rates(records: Sequence[Record]) -> Iterator[str]:
    """p50 and p99 at each rate, and the highest at which p99 is within a millisecond."""
    tried = chosen(records, scene=10)
    rates = sorted({one["tried"] for one in tried})
    yield f"| p50 / p99 us | {' | '.join(f'{rate:,.0f}/s' for rate in rates)} | highest with p99 under 1 ms |"
    yield "|---" * (len(rates) + 2) + "|"
    for contender, case in dict.fromkeys((one["contender"], one["case"]) for one in tried):
        those = chosen(tried, contender=contender, case=case)
        cells = [_at_rate(chosen(those, tried=rate)) for rate in rates]
        highest = highest_rate(those, 1_000)
        title = CONTENDERS[contender].title + (f", {case}" if case else "")
        yield f"| {title} | {' | '.join(cells)} | {f'{highest:,.0f}/s' if highest else 'none of these'} |"


def _at_rate(records: Sequence[Record]) -> str:
    late = median(records, "late")
    if late is None or late > MOST_LATE:
        return "not held" if records else ""
    return f"{median(records, 'p50'):,.0f} / {median(records, 'p99'):,.0f}"
