"""The daemon's settings: one dataclass is their manual, and one rule says where each value came from.

Decides names, units, defaults, bounds, and the order options > SIDEGATE_* variables > file > default.  Knows
no socket and starts nothing; `load` is handed the options and the environment.
"""

from __future__ import annotations

import difflib
import os
import platform
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from datetime import UTC, tzinfo
from typing import Any
from zoneinfo import ZoneInfo

from cluster_link.membership import parse_peers
from sidecar.address import socket_path, strip_scheme
from sidecar.calendar import LAST_INSTANT
from sidecar.forward import FALLBACKS
from sidecar.logs import LEVELS
from sidecar.table import DEFAULT_MAX_BUCKETS, DEFAULT_MAX_CLOCK_SKEW
from sidecar.wire import DEFAULT_MAX_FRAME

PREFIX = "SIDEGATE_"
FILE_VARIABLE = "SIDEGATE_CONFIG"
OFF = "off"
"""A door that is not opened."""
UNIX = "unix:"
# Kubernetes puts these into every pod beside a Service named "sidegate"; they are no settings of ours.
_SERVICE_LINKS = re.compile(r"SIDEGATE_(SERVICE_|PORT$|PORT_\d)")


class ConfigError(ValueError):
    """A setting that cannot be used; the text is one line that names it."""


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"\d{1,18}", text, re.ASCII) or not low <= int(text) <= high:
            raise ValueError(f"must be an integer from {low} to {high}")
        return int(text)

    return parse


def _mode(text: str) -> int:
    if not re.fullmatch(r"(0o?)?[0-7]{3}", text, re.ASCII):
        raise ValueError("must be an octal file mode such as 0660")
    return int(text[-3:], 8)


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return text

    return parse


def _zone(text: str) -> str:
    try:
        time_zone(text)
    except Exception:  # zoneinfo raises by what it tripped over: KeyError, ValueError, OSError
        raise ValueError("must be an IANA time zone such as UTC or Europe/Rome") from None
    return text


def _clock(text: str) -> str:
    kind, separator, start = text.partition(":")
    if text == "system" or (
        kind == "manual" and separator and re.fullmatch(r"\d{1,18}", start, re.ASCII) and int(start) <= LAST_INSTANT
    ):
        return text
    raise ValueError(f"must be system or manual:<epoch ms up to {LAST_INSTANT}>")


def _node(text: str) -> str:
    if not text.isprintable() or not 0 < len(text) <= 253:
        raise ValueError("must be 1 to 253 printable characters")
    return text


def _path(text: str) -> str:
    if not strip_scheme(text) or "\0" in text:
        raise ValueError("must be a path")
    return strip_scheme(text)


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not re.fullmatch(r"\d{1,5}", port, re.ASCII) or not 0 < int(port) < 65_536 or " " in text:
        raise ValueError("must be host:port")
    return text


def _door(text: str) -> str:
    """Where a door is: host:port, unix:/path in one spelling, or off."""
    if text.startswith(UNIX):
        path = strip_scheme(text).removeprefix(UNIX)
        if not path.startswith("/") or "\0" in path:
            raise ValueError("must be host:port, unix:/path or off")
        return UNIX + path
    try:
        return text if text == OFF else _address(text)
    except ValueError:
        raise ValueError("must be host:port, unix:/path or off") from None


def _peers(text: str) -> str:
    parse_peers(text)
    return text


def time_zone(name: str) -> tzinfo:
    """The zone of that IANA name; UTC needs no zone database."""
    return UTC if name == "UTC" else ZoneInfo(name)


def _setting(default: Any, unit: str, effect: str, parse: Callable[[str], Any]) -> Any:
    metadata = {"unit": unit, "effect": effect, "parse": parse}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Config:
    """Every setting of `sidegate serve`: variable SIDEGATE_<NAME>, option --<name>, key <name> in a file."""

    socket: str = _setting(
        socket_path,
        "path",
        "the Unix socket; by default /run/sidegate/sidegate.sock where usable, else below $XDG_RUNTIME_DIR, "
        "else below the temp directory",
        _path,
    )
    socket_mode: int = _setting(0o660, "octal", "permission bits of the socket's file", _mode)
    socket_group: str = _setting(
        "", "name or number", "group of the socket's file, and of its folder where the daemon makes it", str
    )
    node: str = _setting(platform.node, "name", "this node's name, told as the owner of its decisions", _node)
    max_buckets: int = _setting(
        DEFAULT_MAX_BUCKETS,
        "buckets",
        "most buckets held, about 350 bytes each, more with long keys or a limit of its own for each key",
        _integer(1, 100_000_000),
    )
    max_connections: int = _setting(4096, "connections", "most clients at a time", _integer(1, 1_000_000))
    max_frame: int = _setting(DEFAULT_MAX_FRAME, "bytes", "longest frame taken from a client", _integer(1024, 64 << 20))
    max_clock_skew: int = _setting(
        DEFAULT_MAX_CLOCK_SKEW,
        "ms",
        "how far a request's created_at may lie from this clock; beyond, it is clamped",
        _integer(0, 86_400_000),
    )
    time_zone: str = _setting("UTC", "IANA name", "zone of Gregorian windows", _zone)
    clock: str = _setting(
        "system", "", "system, or manual:<epoch ms> for tests: time stands until a client moves it", _clock
    )
    peers: str = _setting(
        "",
        "host:port or name=host:port, comma separated",
        "all daemons of the cluster, this one too; none: this daemon is alone",
        _peers,
    )
    listen: str = _setting(
        "127.0.0.1:1051",
        "host:port, unix:/path or off",
        "where gRPC listens, for peers and for V1 clients; open it only to the cluster's network",
        _door,
    )
    http: str = _setting(
        "127.0.0.1:1050",
        "host:port, unix:/path or off",
        "where HTTP listens: the V1 API as JSON, and health",
        _door,
    )
    advertise: str = _setting(
        "", "host:port", "this daemon's address as its peers list it; by default the one it listens on", _address
    )
    peer_timeout: int = _setting(
        500, "ms", "longest wait for an owner, and silence after which a peer counts as away", _integer(1, 60_000)
    )
    fallback: str = _setting(
        "error",
        "",
        "answer where an owner gives none: error, local (an equal share of the limit), allow or deny",
        _one_of(*FALLBACKS),
    )
    global_sync_interval: int = _setting(
        100, "ms", "how often hits that GLOBAL replicas admitted are told to their owners", _integer(1, 60_000)
    )
    max_replicas: int = _setting(
        100_000, "replicas", "most GLOBAL buckets of other owners that are answered here", _integer(1, 10_000_000)
    )
    batch_wait: int = _setting(
        0, "ms", "how long hits are gathered for a peer at least; 0: only while the link is busy", _integer(0, 1_000)
    )
    batch_limit: int = _setting(1_000, "requests", "most requests in one batch to a peer", _integer(1, 1_000))
    peer_queue: int = _setting(20_000, "requests", "most requests waiting for one peer", _integer(1, 10_000_000))
    stall_timeout: int = _setting(
        10_000, "ms", "how long a client may leave answers unread or a frame unfinished", _integer(100, 3_600_000)
    )
    grace: int = _setting(5_000, "ms", "how long a stopping daemon waits for clients to read", _integer(0, 600_000))
    tracing: str = _setting(
        "off",
        "",
        "on: spans of batches that carry a traced request to its owner, sent where the OTEL_* variables say; needs "
        "sidegate[otel]",
        _one_of("off", "on"),
    )
    log_level: str = _setting("info", "", "lowest level logged: " + ", ".join(LEVELS), _one_of(*LEVELS))
    log_format: str = _setting(
        "auto", "", "json, console, or auto: console on a terminal, else json", _one_of("auto", "json", "console")
    )


SETTINGS: tuple[Field[Any], ...] = fields(Config)
_BY_NAME = {setting.name: setting for setting in SETTINGS}


def shown(setting: Field[Any], value: object) -> str:
    """A value as it would be written in a file."""
    return f"{value:04o}" if setting.metadata["unit"] == "octal" else str(value)


def default_of(setting: Field[Any]) -> Any:
    """A setting's default on this machine."""
    return setting.default_factory() if callable(setting.default_factory) else setting.default


def load(
    options: Mapping[str, str | None], environ: Mapping[str, str] = os.environ, file: str | None = None
) -> tuple[Config, dict[str, str]]:
    """The effective settings and, for each, where it came from: "option", a variable, a file or "default".

    options: values by setting name; None where not given.  file: a TOML file, else the one that
    SIDEGATE_CONFIG names.  Raises ConfigError.
    """
    values: dict[str, Any] = {}
    sources = {setting.name: "default" for setting in SETTINGS}

    def take(name: str, text: str, source: str, label: str) -> None:
        try:
            values[name] = _BY_NAME[name].metadata["parse"](text)
        except ValueError as error:
            raise ConfigError(f"{label}: {error}, not {text!r}") from None
        sources[name] = source

    file = file or environ.get(FILE_VARIABLE)
    if file:
        for name, text in _read(file).items():
            take(name, text, file, f"{name} in {file}")
    for variable in sorted(environ):
        if variable.startswith(PREFIX) and variable != FILE_VARIABLE and not _SERVICE_LINKS.match(variable):
            name = variable.removeprefix(PREFIX).lower()
            if name not in _BY_NAME or variable != variable.upper():
                raise ConfigError(f"{variable}: no such setting{_near(name, PREFIX)}")
            # An empty variable means unset, as it does in most shells and compose files.
            if environ[variable]:
                take(name, environ[variable], variable, variable)
    for name, option in options.items():
        if option is not None:
            take(name, option, "option", "--" + name.replace("_", "-"))
    config = Config(**values)
    if config.peers and config.listen == OFF:
        raise ConfigError("listen: a daemon with peers cannot have it off, since they call it there")
    return config, sources


def _read(file: str) -> dict[str, str]:
    try:
        with open(file, "rb") as stream:
            content = tomllib.load(stream)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not TOML: {error}") from None
    for name, value in content.items():
        if name not in _BY_NAME:
            raise ConfigError(f"{name} in {file}: no such setting{_near(name)}")
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise ConfigError(f"{name} in {file}: must be a string or an integer, not {value!r}")
    # TOML's own octal (0o660) comes as a number; written out in octal it is the mode that was meant.
    return {
        name: f"{value:04o}" if _BY_NAME[name].metadata["unit"] == "octal" and isinstance(value, int) else str(value)
        for name, value in content.items()
    }


def _near(name: str, prefix: str = "") -> str:
    near = difflib.get_close_matches(name, _BY_NAME, 1)
    return f"; did you mean {prefix}{near[0].upper() if prefix else near[0]}?" if near else ""
