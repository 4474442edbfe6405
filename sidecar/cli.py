"""The `sidegate` command: its words, its output, its exit status.

Decides how a person or a script asks; what is asked goes through the client, as any application's call does.
Exit status of `hit` and `peek`: 0 admitted, 1 refused, 2 an error; of the others 0, or 2 for an error.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from sidecar.client import DEFAULT_TIMEOUT, Client
from sidecar.errors import SidegateError
from sidecar.limit import Limit
from sidecar.messages import Decision, Status

_ERROR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        status = run(options)
        sys.stdout.flush()
        return status
    except SidegateError as error:
        print(f"sidegate: {error}", file=sys.stderr)
        return _ERROR
    except BrokenPipeError:
        # The reader of our output (head, say) has gone; Python would complain once more at exit.
        sys.stdout = open("/dev/null", "w")  # noqa: SIM115
        return _ERROR
    except OSError as error:
        print(f"sidegate: {error}", file=sys.stderr)
        sys.stdout = open("/dev/null", "w")  # noqa: SIM115  what is left unwritten would fail once more at exit
        return _ERROR
    except Exception:  # a fault of ours must not read as "refused"
        traceback.print_exc()
        return _ERROR


def settings_of(arguments: Sequence[str]) -> Any:
    """The Config that `sidegate serve` would run with, for programs that start a daemon of their own."""
    parser = argparse.ArgumentParser()
    _add_settings(parser)
    return _load(parser.parse_args(arguments))[0]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sidegate", description="A rate limiter that rides beside Python workers.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    serve = commands.add_parser("serve", help="run the daemon", description="Run the daemon in the foreground.")
    _add_settings(serve)
    serve.set_defaults(run=_serve)

    config = commands.add_parser(
        "config",
        help="show the effective settings",
        description="Show the effective settings and where each came from.",
    )
    _add_settings(config)
    config.add_argument("--json", action="store_true", help="print JSON")
    config.add_argument(
        "--check", metavar="FILE", help="look at FILE alone: exit 0 and ok, or exit 2 and one line that names the fault"
    )
    config.set_defaults(run=_config)

    hit = commands.add_parser(
        "hit", help="ask for tokens", description="Ask for tokens of a limit. Exit 0 admitted, 1 refused, 2 error."
    )
    _add_limit(hit)
    hit.add_argument(
        "--hits", type=int, default=1, metavar="N", help="tokens asked for; negative gives back (default 1)"
    )
    hit.set_defaults(run=_hit)

    peek = commands.add_parser(
        "peek", help="see what is left", description="See what is left of a limit, consuming nothing."
    )
    _add_limit(peek)
    peek.set_defaults(run=_hit, hits=0)

    reset = commands.add_parser(
        "reset", help="forget a bucket", description="Forget the bucket of a limit's name and a key."
    )
    reset.add_argument("name", metavar="NAME", help="the limit's name")
    reset.add_argument("key", metavar="KEY", help="who is limited")
    _add_connection(reset)
    reset.set_defaults(run=_reset)

    ping = commands.add_parser(
        "ping", help="see whether the daemon answers", description="Print the name of the node that answers."
    )
    _add_connection(ping)
    ping.set_defaults(run=_ping)

    info = commands.add_parser(
        "info", help="what the daemon says of itself", description="Version, node, uptime and counters."
    )
    _add_connection(info)
    info.set_defaults(run=_info)

    peers = commands.add_parser(
        "peers", help="the daemons of the cluster", description="The cluster as this daemon knows it."
    )
    _add_connection(peers)
    peers.set_defaults(run=_peers)

    top = commands.add_parser(
        "top",
        help="watch the daemon at work",
        description="A live view of one daemon: rates, hottest names and keys, peers. q or Ctrl-C ends it.",
    )
    top.add_argument("--once", action="store_true", help="print one view, of one interval, and end")
    top.add_argument(
        "--interval", type=float, default=1.0, metavar="S", help="seconds between two looks, 0.1 to 3600 (default 1)"
    )
    _add_connection(top)
    top.set_defaults(run=_top)

    cluster = commands.add_parser(
        "cluster",
        help="run several linked daemons, for trying and for tests",
        description="Run linked daemons on free ports of 127.0.0.1, their sockets in one folder. Ctrl-C stops all.",
    )
    cluster.add_argument("--nodes", type=int, default=3, metavar="N", help="how many daemons, 1 to 32 (default 3)")
    cluster.add_argument("--folder", metavar="PATH", help="where their sockets are (default: a new folder)")
    cluster.set_defaults(run=_cluster)

    clock = commands.add_parser(
        "clock",
        help="move a manual clock",
        description="Move the clock of a daemon started with --clock manual:<epoch ms>.",
    )
    clock.add_argument(
        "how", choices=("advance", "set"), help="advance by MS, or set to MS since the epoch (also back)"
    )
    clock.add_argument("ms", type=int, metavar="MS", help="milliseconds")
    _add_connection(clock)
    clock.set_defaults(run=_clock)
    return parser


def _add_settings(parser: argparse.ArgumentParser) -> None:
    from sidecar.config import SETTINGS, default_text

    parser.add_argument("--config", metavar="FILE", help="a TOML file of settings (also SIDEGATE_CONFIG)")
    for setting in SETTINGS:
        unit = setting.metadata["unit"]
        text = setting.metadata["effect"] + (f" [{unit}]" if unit else "")
        text += f" (default {default_text(setting)})"
        parser.add_argument(
            "--" + setting.name.replace("_", "-"),
            metavar=setting.name.rpartition("_")[2].upper(),
            help=f"{text}; SIDEGATE_{setting.name.upper()}".replace("%", "%%"),
        )


def _add_connection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--socket", metavar="PATH", help="the daemon's socket (default: found as the daemon finds it)")
    parser.add_argument(
        "--timeout",
        type=float,
        default=DEFAULT_TIMEOUT * 10,
        metavar="S",
        help="seconds for the whole call (default 1)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_limit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the limit's name, such as requests_per_sec")
    parser.add_argument("key", metavar="KEY", help="who is limited, such as account:123")
    parser.add_argument("--limit", type=int, required=True, metavar="N", help="tokens per window")
    parser.add_argument(
        "--per",
        required=True,
        metavar="WINDOW",
        help='the window: ms, "250ms", "1s", "5m", "12h", "1d" or "calendar month"',
    )
    parser.add_argument(
        "--algorithm", choices=("token", "leaky"), default="token", help="how it counts (default token)"
    )
    parser.add_argument(
        "--burst", type=int, default=0, metavar="N", help="a leaky bucket's capacity; 0, the default, means the limit"
    )
    _add_connection(parser)


def _serve(options: argparse.Namespace) -> int:
    config, _ = _load(options)
    if config is None:
        return _ERROR
    try:
        from sidecar.daemon import serve
    except ModuleNotFoundError as error:
        print(f"sidegate: the daemon needs {error.name}: pip install 'sidegate[daemon]'", file=sys.stderr)
        return _ERROR
    return serve(config, lambda: _read(options)[0])


def _config(options: argparse.Namespace) -> int:
    from sidecar.config import SETTINGS, shown

    if options.check is not None:
        return _check(options)
    config, sources = _load(options)
    if config is None:
        return _ERROR
    rows = [
        (setting.name, shown(setting, getattr(config, setting.name)), sources[setting.name]) for setting in SETTINGS
    ]
    if options.json:
        print(json.dumps({name: {"value": value, "source": source} for name, value, source in rows}, indent=2))
    else:
        for name, value, source in rows:
            print(f"{name:<24}{value:<44}{source}")
    return 0


def _check(options: argparse.Namespace) -> int:
    from sidecar.config import SETTINGS, ConfigError, check

    for name in ("config", *(setting.name for setting in SETTINGS)):
        if getattr(options, name) is not None:
            print(f"sidegate: --check looks at a file alone: leave out --{name.replace('_', '-')}", file=sys.stderr)
            return _ERROR
    try:
        reloadable, others = check(options.check)
    except ConfigError as error:
        print(f"sidegate: {error}", file=sys.stderr)
        return _ERROR
    if options.json:
        print(json.dumps({"ok": True, "sighup": reloadable, "restart": others}))
    else:
        print("ok")
        print(f"SIGHUP changes: {', '.join(reloadable) or 'none of its settings'}")
        print(f"needs a restart: {', '.join(others) or 'none of its settings'}")
    return 0


def _load(options: argparse.Namespace) -> tuple[Any, dict[str, str]]:
    from sidecar.config import ConfigError

    try:
        return _read(options)
    except ConfigError as error:
        print(f"sidegate: {error}", file=sys.stderr)
        return None, {}


def _read(options: argparse.Namespace) -> tuple[Any, dict[str, str]]:
    from sidecar.config import SETTINGS, load

    return load({setting.name: getattr(options, setting.name) for setting in SETTINGS}, file=options.config)


def _client(options: argparse.Namespace) -> Client:
    return Client(options.socket, timeout=options.timeout)


def _hit(options: argparse.Namespace) -> int:
    per = options.per + "ms" if options.per.isdigit() else options.per
    limit = Limit(options.name, options.limit, per, algorithm=options.algorithm, burst=options.burst)
    with _client(options) as client:
        (decision,) = client.check([limit.request(options.key, options.hits)])
    if options.json:
        print(json.dumps(_plain(decision)))
    else:
        print(_told(decision))
    return _ERROR if decision.status == Status.ERROR else int(not decision.allowed)


def _plain(decision: Decision) -> dict[str, object]:
    return {
        "allowed": decision.allowed,
        **{name: getattr(decision, name) for name in decision.__slots__},
        "status": decision.status.name,
    }


def _told(decision: Decision) -> str:
    if decision.error:
        return f"{decision.status.name}: {decision.error}"
    text = f"{decision.status.name}  {decision.remaining} of {decision.limit} left, reset at {decision.reset_time}"
    return text if decision.allowed else f"{text}, retry after {decision.retry_after} ms"


def _reset(options: argparse.Namespace) -> int:
    with _client(options) as client:
        existed = client.reset(options.name, options.key)
    print(json.dumps({"existed": existed}) if options.json else "forgotten" if existed else "there was no such bucket")
    return 0


def _ping(options: argparse.Namespace) -> int:
    with _client(options) as client:
        node = client.ping()
    print(json.dumps({"node": node}) if options.json else node)
    return 0


def _info(options: argparse.Namespace) -> int:
    with _client(options) as client:
        info = client.info()
    if options.json:
        print(json.dumps(info, indent=2))
    else:
        for name, value in _flat(info):
            print(f"{name:<32}{value}")
    return 0


def _peers(options: argparse.Namespace) -> int:
    with _client(options) as client:
        facts = client.peers()
    if options.json:
        print(json.dumps(facts, indent=2))
    elif not facts:
        print("this daemon is alone: it was given no peers")
    else:
        if "discovery" in facts:
            print(_heard(facts["discovery"]))
        widths = [max([26, *(len(peer[column]) for peer in facts["peers"])]) for column in ("name", "address")]
        for peer in facts["peers"]:
            # What it calls itself in decisions, where the ring has another name for it.
            node = f"  {peer['node']}" if peer["node"] not in ("", peer["name"]) else ""
            print(f"{peer['name']:<{widths[0]}}  {peer['address']:<{widths[1]}}  {peer['state']}{node}".rstrip())
    return 0


def _heard(told: dict[str, Any]) -> str:
    """One line on the source of peers."""
    age = "never heard" if told["age_ms"] is None else f"heard {told['age_ms'] / 1000:.1f} s ago"
    guess = ", provisional" if told["provisional"] else ""
    return f"by {told['source']}: {told['state']}, {age}{guess}" + (f" ({told['why']})" if told["why"] else "")


def _top(options: argparse.Namespace) -> int:
    if not 0.1 <= options.interval <= 3600:
        print("sidegate: --interval must be from 0.1 to 3600", file=sys.stderr)
        return _ERROR
    if options.json and not options.once:
        print("sidegate: --json goes with --once", file=sys.stderr)
        return _ERROR
    with _client(options) as client:
        if options.once and options.json:
            from sidecar.rates import look_twice

            print(json.dumps(look_twice(client, options.interval), indent=2))
            return 0
        try:
            from sidecar.top import can_draw, print_once, watch
        except ModuleNotFoundError as error:
            print(f"sidegate: top needs {error.name}: pip install 'sidegate[daemon]'", file=sys.stderr)
            return _ERROR
        if options.once:
            print_once(client, options.interval)
            return 0
        if not can_draw():
            print("sidegate: top draws on a terminal; elsewhere use --once", file=sys.stderr)
            return _ERROR
        return watch(client, options.interval)


def _cluster(options: argparse.Namespace) -> int:
    from sidecar.trial import run_cluster

    if not 1 <= options.nodes <= 32:
        print("sidegate: --nodes must be from 1 to 32", file=sys.stderr)
        return _ERROR
    return run_cluster(options.nodes, options.folder)


def _flat(info: dict[str, Any], prefix: str = "") -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = []
    for name, value in info.items():
        rows += _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]
    return rows


def _clock(options: argparse.Namespace) -> int:
    with _client(options) as client:
        now = client.advance_clock(options.ms) if options.how == "advance" else client.set_clock(options.ms)
    print(json.dumps({"now": now}) if options.json else now)
    return 0
