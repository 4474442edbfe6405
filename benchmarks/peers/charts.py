"""The records as pictures: PNG files by matplotlib, which is loaded here and nowhere else.

Decides what is drawn; every bar is a median over rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.arithmetic import Record, chosen, median
from benchmarks.peers.contenders import CONTENDERS
from benchmarks.peers.report import TITLES

_COLOURS = {
    "sidegate": "#1b7f5c",
    "gubernator": "#c0582b",
    "redis": "#8c2f6b",
    "none": "#777777",
    "echo": "#bbbbbb",
    "stream": "#557799",
}


def charts(records: Sequence[Record], folder: Path) -> list[Path]:
    """Draw what the records have, and tell the files: rate.png, latency.png, cpu.png, keys.png, millisecond.png."""
    drawn = [draw(records, folder) for draw in (_rate, _latency, _cpu, _keys, _millisecond)]
    return [path for path in drawn if path is not None]


def _canvas(panels: int, height: float) -> tuple[Any, list[Any]]:
    import matplotlib

    matplotlib.use("Agg")  # no display
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, panels, figsize=(5.5 * panels, height), squeeze=False, layout="constrained")
    return figure, list(axes[0])


def _names(records: Sequence[Record]) -> list[str]:
    present = {one["contender"] for one in records}
    return [name for name in reversed(CONTENDERS) if name in present]


def _bars(axis: Any, records: Sequence[Record], field: str, scale: float, form: str, title: str) -> None:
    names = [name for name in _names(records) if median(chosen(records, contender=name), field) is not None]
    values = [(median(chosen(records, contender=name), field) or 0.0) / scale for name in names]
    colours = [_COLOURS[CONTENDERS[name].system] for name in names]
    bars = axis.barh([CONTENDERS[name].title for name in names], values, color=colours)
    axis.bar_label(bars, [form.format(value) for value in values], padding=3, fontsize=8)
    axis.set_title(title, fontsize=9)
    axis.margins(x=0.18)
    axis.tick_params(labelsize=8)


def _save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _rate(records: Sequence[Record], folder: Path) -> Path | None:
    scenes = [scene for scene in (1, 2, 3, 5) if chosen(records, scene=scene)]
    if not scenes:
        return None
    figure, axes = _canvas(len(scenes), 3.6)
    for axis, scene in zip(axes, scenes, strict=True):
        _bars(axis, chosen(records, scene=scene), "rate", 1, "{:,.0f}", f"{TITLES[scene]}:\ndecisions/s")
    return _save(figure, folder / "rate.png")


def _latency(records: Sequence[Record], folder: Path) -> Path | None:
    held = chosen(records, scene=9, case="70 %") or chosen(records, scene=2)
    if not held:
        return None
    figure, axes = _canvas(3, 3.6)
    title = TITLES[held[0]["scene"]]
    for axis, (field, name) in zip(axes, (("p50", "p50"), ("p99", "p99"), ("p999", "p99.9")), strict=True):
        _bars(axis, held, field, 1, "{:,.0f}", f"{title}:\n{name}, us")
    return _save(figure, folder / "latency.png")


def _cpu(records: Sequence[Record], folder: Path) -> Path | None:
    held = chosen(records, scene=9, case="70 %") or chosen(records, scene=2)
    if not held:
        return None
    figure, axes = _canvas(2, 3.6)
    title = TITLES[held[0]["scene"]]
    _bars(axes[0], held, "worker_cpu", 1, "{:,.0f}", f"{title}:\nworkers' CPU seconds a million decisions")
    _bars(axes[1], held, "server_cpu", 1, "{:,.0f}", f"{title}:\nservers' CPU seconds a million decisions")
    return _save(figure, folder / "cpu.png")


def _keys(records: Sequence[Record], folder: Path) -> Path | None:
    filling = [one for one in chosen(records, scene=7) if "bucket" in one]
    if not filling:
        return None
    cases = list(dict.fromkeys(one["case"] for one in filling))
    figure, axes = _canvas(2 * len(cases), 3.0)
    for number, case in enumerate(cases):
        those = chosen(filling, case=case)
        _bars(axes[2 * number], those, "bucket", 1, "{:,.0f}", f"{case}: bytes a key")
        _bars(axes[2 * number + 1], those, "worst", 1000, "{:,.1f}", f"{case}: a probe's worst round trip, ms")
    return _save(figure, folder / "keys.png")


def _millisecond(records: Sequence[Record], folder: Path) -> Path | None:
    tried = chosen(records, scene=10)
    if not tried:
        return None
    figure, axes = _canvas(2, 4.0)
    for axis, (field, name) in zip(axes, (("p50", "p50"), ("p99", "p99")), strict=True):
        for contender, case in dict.fromkeys((one["contender"], one["case"]) for one in tried):
            those = chosen(tried, contender=contender, case=case)
            rates = sorted({one["tried"] for one in those})
            values = [median(chosen(those, tried=rate), field) or 0.0 for rate in rates]
            title = CONTENDERS[contender].title + (f", {case}" if case else "")
            style = "--" if case == "forwarded" else "-"
            axis.plot(rates, values, style, marker=".", color=_COLOURS[CONTENDERS[contender].system], label=title)
        axis.axhline(1_000, color="black", linewidth=0.5)
        axis.set(xscale="log", yscale="log", xlabel="calls a second, 8 workers", ylabel=f"{name} of a call, us")
        axis.set_title(f"{TITLES[10]}:\n{name}", fontsize=9)
        axis.legend(fontsize=7)
    return _save(figure, folder / "millisecond.png")
