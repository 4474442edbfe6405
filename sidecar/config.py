"""The daemon's settings: one dataclass is their manual, and one rule says where each value came from.

Decides names, units, defaults, bounds, which of them SIGHUP may change, and the order options > SIDEGATE_*
variables > file > default.  Knows no socket and starts nothing; `load` is handed the options and the environment.
docs/configuration.md is written from here (manual.py).
"""

from __future__ import annotations

import difflib
import os
import platform
import re
import stat
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from datetime import UTC, tzinfo
from ipaddress import ip_address
from typing import Any
from zoneinfo import ZoneInfo

from cluster_link.discovery.dns_names import parse_names
from cluster_link.discovery.endpoints import IDENTITIES
from cluster_link.membership import parse_peers
from sidecar.address import socket_path, strip_scheme
from sidecar.calendar import LAST_INSTANT
from sidecar.forward import FALLBACKS
from sidecar.logs import LEVELS
from sidecar.table import DEFAULT_MAX_BUCKETS, DEFAULT_MAX_CLOCK_SKEW
from sidecar.tally import DEFAULT_NAMES
from sidecar.wire import DEFAULT_MAX_FRAME

PREFIX = "SIDEGATE_"
FILE_VARIABLE = "SIDEGATE_CONFIG"
DISCOVERY = ("static", "dns", "etcd", "kubernetes")
OFF = "off"
"""A door that is not opened."""
UNIX = "unix:"
_TOML_TYPES = {bool: "a boolean", float: "a float", list: "an array", dict: "a table"}
_BEYOND = 10**18
"""More digits than any setting takes."""
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


def _endpoints(text: str) -> str:
    try:
        if "/" in text:
            raise ValueError
        return ",".join(_address(part.strip()) for part in text.split(","))
    except ValueError:
        raise ValueError("must be host:port, comma separated, without a scheme") from None


def _prefix(text: str) -> str:
    if not text.isprintable() or not text.rstrip("/") or len(text) > 1_000:
        raise ValueError("must be 1 to 1000 printable characters, not slashes alone")
    return text.rstrip("/")


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


def _server_name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._:-]{1,253}", text, re.ASCII):
        raise ValueError("must be a host name or an IP address")
    return text


def _label(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", text, re.ASCII):
        raise ValueError("must be 1 to 63 of a-z, 0-9 and -, no - at the ends")
    return text


def _peers(text: str) -> str:
    parse_peers(text)
    return text


def _dns_names(text: str) -> str:
    if not text:
        raise ValueError("must be host:port or _service._tcp.host, comma separated")
    parse_names(text)
    return text


def _server(text: str) -> str:
    try:
        host = _address(text).rpartition(":")[0]
        ip_address(host.removeprefix("[").removesuffix("]") if host.startswith("[") else host)
    except ValueError:
        raise ValueError("must be an IP address and a port") from None
    return text


def time_zone(name: str) -> tzinfo:
    """The zone of that IANA name; UTC needs no zone database."""
    return UTC if name == "UTC" else ZoneInfo(name)


def _setting(
    default: Any,
    unit: str,
    effect: str,
    parse: Callable[[str], Any],
    *,
    reason: str,
    reloadable: bool = False,
    rule: str = "",
) -> Any:
    """A setting's place in the manual.

    default: its value, or what finds it on this machine; `rule` then tells how.  unit: "" for a choice of words.
    effect: what it does.  reason: why the default is what it is, or why one would change it.
    parse: text -> value; raises ValueError, whose text ("must be ...") also tells the manual what is taken.
    reloadable: SIGHUP changes it; the daemon has a row for it in its `reload`.
    """
    metadata = {
        "unit": unit,
        "effect": effect,
        "parse": parse,
        "reason": reason,
        "reloadable": reloadable,
        "rule": rule,
    }
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Config:
    """Every setting of `sidegate serve`: variable SIDEGATE_<NAME>, option --<name>, key <name> in a file."""

    socket: str = _setting(
        socket_path,
        "path",
        "the Unix socket that clients ask through",
        _path,
        rule="/run/sidegate/sidegate.sock where usable, else below $XDG_RUNTIME_DIR, else below the temp directory",
        reason="clients look in the same places in the same order, so that neither side needs a setting; name one "
        "where two daemons share a host, or where a container mounts the socket's folder",
    )
    socket_mode: int = _setting(
        0o660,
        "octal",
        "permission bits of the socket's file",
        _mode,
        reason="who may write to the socket may spend any limit: owner and group by default; 0666 lets every user of "
        "the host ask",
    )
    socket_group: str = _setting(
        "",
        "name or number",
        "group of the socket's file, and of its folder where the daemon makes it",
        str,
        reason="lets workers that run as another user in, without opening the socket to everyone; none: the daemon's "
        "own group",
    )
    node: str = _setting(
        platform.node,
        "name",
        "this node's name, told as the owner of its decisions",
        _node,
        rule="the host's name",
        reason="a host has one daemon, so its name tells them apart; give each a name of its own where several share "
        "a host, and the name that `peers` lists it by where that has names",
    )
    max_buckets: int = _setting(
        DEFAULT_MAX_BUCKETS,
        "buckets",
        "most buckets held, about 350 bytes each, more with long keys or a limit of its own for each key",
        _integer(1, 100_000_000),
        reason="bounds memory at about 350 MB; raise it when `table_full` is logged, since a bucket lost early is a "
        "limit that starts anew",
    )
    max_connections: int = _setting(
        4096,
        "connections",
        "most clients at a time, at each door: the socket, gRPC (peers too) and HTTP",
        _integer(1, 1_000_000),
        reason="a worker holds one connection a thread that asks at a time; a leak in one application then ends "
        "here, not at the host's open files. Needs as many open files for each door that is open, and 64 more",
    )
    max_frame: int = _setting(
        DEFAULT_MAX_FRAME,
        "bytes",
        "longest frame taken from a client",
        _integer(1024, 64 << 20),
        reason="a thousand requests with ordinary keys fit; it bounds what one client can make the daemon hold "
        "before it is understood",
    )
    max_clock_skew: int = _setting(
        DEFAULT_MAX_CLOCK_SKEW,
        "ms",
        "how far a request's created_at may lie from this clock; beyond, it is clamped",
        _integer(0, 86_400_000),
        reason="honours a caller's own instant where clocks differ a little or a queue lies between, and stops a "
        "wrong clock from freeing or filling buckets; 0: the daemon's time alone counts",
    )
    time_zone: str = _setting(
        "UTC",
        "IANA name",
        "zone of Gregorian windows",
        _zone,
        reason="UTC has no day of 23 or 25 hours; set the zone your customers' days and months are billed in, the "
        "same on all daemons of a cluster",
    )
    clock: str = _setting(
        "system",
        "",
        "system, or manual:<epoch ms> for tests: time stands until a client moves it",
        _clock,
        reason="a manual clock makes tests of windows exact and quick; never use it where limits matter, as any "
        "client may move it",
    )
    discovery: str = _setting(
        "static",
        "",
        "where the set of peers comes from: static, `peers` or `peers_file`; dns, `dns_names`; etcd, the keys below "
        "`etcd_prefix`; kubernetes, a Service's EndpointSlices (docs/discovery.md)",
        _one_of(*DISCOVERY),
        reason="a list is enough where hosts seldom change; the others follow a scale-up within two seconds",
    )
    etcd_endpoints: str = _setting(
        "",
        "host:port, comma separated",
        "etcd's servers, v3.4 or later; needed with `discovery` etcd, which lists this daemon as `node` at `advertise`",
        _endpoints,
        reason="they are tried in turn, so that one that is down keeps nobody from following; TLS is spoken where "
        "`etcd_ca` is set, so no scheme stands before them",
    )
    etcd_prefix: str = _setting(
        "/sidegate/peers",
        "key",
        "below which each daemon has a key of its name, whose value is its address",
        _prefix,
        reason="the same on all daemons of a cluster; one etcd serves several clusters below different prefixes",
    )
    etcd_ttl: int = _setting(
        10,
        "s",
        "how long a daemon that was killed stays registered; the lease is renewed three times in it",
        _integer(3, 3_600),
        reason="until then its keys fall back; much less, and a daemon that etcd does not hear for a moment loses its "
        "keys to others and gets them back",
    )
    etcd_user: str = _setting(
        "",
        "name",
        "the user that etcd knows this daemon as, with `etcd_password_file`; none: no user, or the certificate's",
        _node,
        reason="needed where etcd's authentication is on; the user needs to read and write below `etcd_prefix` alone",
    )
    etcd_password_file: str = _setting(
        "",
        "path",
        "file with that user's password; a newline at its end is none of it",
        _path,
        reason="a file, since variables and options are seen by others; it is read anew for each connection",
    )
    etcd_ca: str = _setting(
        "",
        "path",
        "PEM file of the CAs that may have signed the certificates of etcd's servers; switches TLS to them on",
        _path,
        reason="the file is read anew for each connection, as the two below are, so that a renewal needs no restart",
    )
    etcd_cert: str = _setting(
        "",
        "path",
        "PEM file of the certificate that etcd is shown, with `etcd_key`",
        _path,
        reason="needed where etcd asks for client certificates",
    )
    etcd_key: str = _setting(
        "",
        "path",
        "PEM file of that certificate's private key, not encrypted",
        _path,
        reason="the daemon's user alone should be able to read it",
    )
    peers: str = _setting(
        "",
        "host:port or name=host:port, comma separated",
        "all daemons of the cluster, this one too; none: this daemon is alone",
        _peers,
        reloadable=True,
        reason="one limit over many hosts needs every daemon to know the same set; one host needs none of it",
    )
    peers_file: str = _setting(
        "",
        "path",
        "a file that lists them instead, lines or commas apart, # before comments; read when it changes and at SIGHUP",
        _path,
        reason="lets whatever manages the hosts write the list, and a change needs no signal",
    )
    dns_names: str = _setting(
        "",
        "host:port or _service._tcp.host, comma separated",
        "where DNS tells of peers: addresses (A, else AAAA) with a port, or SRV records",
        _dns_names,
        reason="many platforms keep a name that follows the hosts behind it, such as a headless Service",
    )
    dns_server: str = _setting(
        "",
        "IP address:port",
        "the DNS server that is asked; none: those of /etc/resolv.conf",
        _server,
        reason="the host's own resolver is right but where peers are known to another one alone",
    )
    dns_min_interval: int = _setting(
        1_000,
        "ms",
        "shortest time between two questions; the answers' TTL decides within the bounds",
        _integer(100, 3_600_000),
        reason="follows a scale-up within two seconds where TTLs are short, and spares a server that gives a TTL of 0",
    )
    dns_max_interval: int = _setting(
        30_000,
        "ms",
        "longest time between two questions, also while the server gives no answer",
        _integer(100, 86_400_000),
        reason="a TTL of hours must not keep a daemon from hearing of a change",
    )
    kubernetes_namespace: str = _setting(
        "",
        "name",
        "the namespace that the Service is in",
        _label,
        rule="the variable POD_NAMESPACE",
        reason="a Service selects pods of its own namespace, so a ring is one namespace's; name it only outside of "
        "a pod",
    )
    kubernetes_service: str = _setting(
        "sidegate-peers",
        "name",
        "the headless Service that selects all daemons of the cluster",
        _label,
        reason="one ring is one Service; it needs `publishNotReadyAddresses: true` (deploy/kubernetes/)",
    )
    kubernetes_port: str = _setting(
        "grpc",
        "name",
        "the name of the Service's port that is the daemons' `listen`",
        _label,
        reason="by its name, so that pods may have different numbers; a Service's other ports are passed over",
    )
    kubernetes_identity: str = _setting(
        "uid",
        "",
        "what places a pod on the ring: uid, node or pod, its own name",
        _one_of(*IDENTITIES),
        reason="a uid is never used again; node keeps every key's owner where a DaemonSet's pod is replaced, pod where "
        "a StatefulSet's is. The same on all daemons of a cluster",
    )
    kubernetes_kubeconfig: str = _setting(
        "",
        "path",
        "a kubeconfig file that says where the API server is and who asks",
        _path,
        rule="the pod's own service account",
        reason="a pod needs none; a daemon outside of the cluster does, and its pods must reach it",
    )
    listen: str = _setting(
        "127.0.0.1:1051",
        "host:port, unix:/path or off",
        "where gRPC listens, for peers and for V1 clients; open it only to the cluster's network",
        _door,
        reason="nothing but this host can reach the default; a cluster needs an address that its hosts reach, and off "
        "spares the memory that gRPC takes where one host is all there is",
    )
    http: str = _setting(
        "127.0.0.1:1050",
        "host:port, unix:/path or off",
        "where HTTP listens: the V1 API as JSON, and health",
        _door,
        reason="nothing but this host can reach the default; name an address where probes or scrapers come from "
        "elsewhere, a Unix socket where a file's permissions shall guard it",
    )
    advertise: str = _setting(
        "",
        "host:port",
        "this daemon's address as its peers list it",
        _address,
        rule="as `listen`",
        reason="needed where the two differ: it listens on 0.0.0.0, or behind a translated address",
    )
    tls_ca: str = _setting(
        "",
        "path",
        "PEM file of the CAs that may have signed the certificates of peers and of V1 clients; with `tls_cert` and "
        "`tls_key` it switches TLS on (docs/tls.md), which SIGHUP does not",
        _path,
        reloadable=True,
        reason="a cluster on a network that others share needs it: whoever reaches an open port may spend any limit",
    )
    tls_cert: str = _setting(
        "",
        "path",
        "PEM file of this daemon's certificate, intermediate ones behind it, shown to peers and clients alike",
        _path,
        reloadable=True,
        reason="files are looked at once a second and taken over when they change, so that a renewal needs no "
        "restart and loses no request",
    )
    tls_key: str = _setting(
        "",
        "path",
        "PEM file of that certificate's private key, not encrypted: RSA of 2048 bits or more, ECDSA P-256 or P-384",
        _path,
        reloadable=True,
        reason="the daemon's user alone should be able to read it",
    )
    tls_server_name: str = _setting(
        "",
        "host name",
        "the name that every peer's certificate must bear, in place of the host it is dialled by",
        _server_name,
        reloadable=True,
        reason="lets one certificate serve peers whose addresses come and go, as those of pods do",
    )
    tls_min_version: str = _setting(
        "1.3",
        "",
        "lowest version of TLS that is spoken, both ways: 1.2 or 1.3",
        _one_of("1.2", "1.3"),
        reason="peers are all ours and speak 1.3; 1.2 lets V1 and HTTP clients in that are older",
    )
    peer_timeout: int = _setting(
        500,
        "ms",
        "longest wait for an owner, and silence after which a peer counts as away",
        _integer(1, 60_000),
        reason="far above a round trip in one site, so that a pause is no outage; lower it where callers would "
        "rather have the fallback soon (a caller's own deadline always comes first)",
    )
    fallback: str = _setting(
        "error",
        "",
        "answer where an owner gives none: error, local (an equal share of the limit), allow or deny",
        _one_of(*FALLBACKS),
        reloadable=True,
        reason="error hides nothing and leaves the choice to the caller; local keeps limiting while an owner is "
        "away, allow puts being open first, deny puts being safe first",
    )
    hot_keys: int = _setting(
        64,
        "keys",
        "how many of the hottest keys and names `sidegate top` chooses from; 0: they are not counted",
        _integer(0, 10_000),
        reason="every key asked for more often than 1 in `hot_keys` is found; counting costs 3 to 4 % of the deciding "
        "of one-hit frames, and more keys a few hundred bytes each",
    )
    metric_names: int = _setting(
        DEFAULT_NAMES,
        "names",
        "how many limits' names have metrics of their own, the first that come; the rest are counted as `_other`",
        _integer(0, 1_000),
        reason="each name is three series of every daemon, and names that callers make up must not fill the "
        "monitoring; a scrape holds requests up for 2 to 3 ms with 100 names, for 20 ms with 1,000",
    )
    global_sync_interval: int = _setting(
        100,
        "ms",
        "how often hits that GLOBAL replicas admitted are told to their owners",
        _integer(1, 60_000),
        reason="what a cluster may admit over a GLOBAL limit grows with it, and messages to owners grow as it shrinks",
    )
    max_replicas: int = _setting(
        100_000,
        "replicas",
        "most GLOBAL buckets of other owners that are answered here",
        _integer(1, 10_000_000),
        reason="bounds their memory apart from `max_buckets`; keys past it ask their owners each time, so raise it "
        "to the number of GLOBAL keys in use in one window",
    )
    batch_wait: int = _setting(
        0,
        "ms",
        "how long hits are gathered for a peer at least; 0: only while the link is busy",
        _integer(0, 1_000),
        reason="0 adds no delay and still gathers under load; a wait makes fewer, larger batches for as much more "
        "latency",
    )
    batch_limit: int = _setting(
        1_000,
        "requests",
        "most requests in one batch to a peer",
        _integer(1, 1_000),
        reason="the most that one frame may hold; smaller batches keep an owner's loop free for others in between",
    )
    peer_queue: int = _setting(
        20_000,
        "requests",
        "most requests waiting for one peer",
        _integer(1, 10_000_000),
        reason="bounds memory and the wait when an owner is slower than its askers; past it requests fall back at "
        "once rather than too late",
    )
    stall_timeout: int = _setting(
        10_000,
        "ms",
        "how long a client may leave answers unread or a frame unfinished; over HTTP, a request's head or its body",
        _integer(100, 3_600_000),
        reason="longer than a worker is ever paused in normal life (a debugger aside); such a client holds memory "
        "for as long",
    )
    grace: int = _setting(
        5_000,
        "ms",
        "how long a stopping daemon waits for clients to read",
        _integer(0, 600_000),
        reason="clients read within milliseconds, and supervisors wait longer than this before they kill; 0 stops at "
        "once",
    )
    log_level: str = _setting(
        "info",
        "",
        "lowest level logged: " + ", ".join(LEVELS),
        _one_of(*LEVELS),
        reloadable=True,
        reason="info tells changes, never hits, so that it stays short; warning tells trouble alone",
    )
    tracing: str = _setting(
        "off",
        "",
        "on: spans of batches that carry a traced request to its owner, sent where the OTEL_* variables say; needs "
        "sidegate[otel]",
        _one_of("off", "on"),
        reason="most installations send no spans, and what is off costs a request nothing",
    )
    log_format: str = _setting(
        "auto",
        "",
        "json, console, or auto: console on a terminal, else json",
        _one_of("auto", "json", "console"),
        reason="people read terminals and programs read pipes; set it where something else reads either",
    )


SETTINGS: tuple[Field[Any], ...] = fields(Config)
_BY_NAME = {setting.name: setting for setting in SETTINGS}


def shown(setting: Field[Any], value: object) -> str:
    """A value as it would be written in a file."""
    return f"{value:04o}" if setting.metadata["unit"] == "octal" else str(value)


def default_of(setting: Field[Any]) -> Any:
    """A setting's default on this machine."""
    return setting.default_factory() if callable(setting.default_factory) else setting.default


def default_text(setting: Field[Any]) -> str:
    """A setting's default as any machine's manual tells it: the value, or the rule that finds it, or "none"."""
    rule: str = setting.metadata["rule"]
    return rule or shown(setting, setting.default) or "none"


def check(file: str) -> tuple[list[str], list[str]]:
    """The settings that a file names, in the manual's order: those that SIGHUP changes, those that need a restart.

    The file is looked at alone, without this process's variables.  Raises ConfigError for what `load` would.
    """
    _, sources = load({}, {}, file)
    named = [setting for setting in SETTINGS if sources[setting.name] == file]
    return (
        [setting.name for setting in named if setting.metadata["reloadable"]],
        [setting.name for setting in named if not setting.metadata["reloadable"]],
    )


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
    _check_discovery(config)
    files = {"tls_ca": config.tls_ca, "tls_cert": config.tls_cert, "tls_key": config.tls_key}
    missing = [name for name, path in files.items() if not path]
    if missing and len(missing) < len(files):
        raise ConfigError(f"{missing[0]}: is missing; TLS takes tls_ca, tls_cert and tls_key, all three or none")
    if missing and config.tls_server_name:
        raise ConfigError("tls_server_name: has no effect without tls_ca, tls_cert and tls_key")
    return config, sources


def _check_discovery(config: Config) -> None:
    kind = config.discovery
    if kind != "static" and config.peers:
        raise ConfigError(f"peers: are told by {kind} (discovery), so none can be listed here")
    if config.peers_file and (kind != "static" or config.peers):
        other = "peers" if config.peers else f"discovery {kind}"
        raise ConfigError(f"peers_file: is one way to tell the peers and {other} another; choose one")
    if (kind == "dns") != bool(config.dns_names):
        raise ConfigError("dns_names: says where discovery dns asks; neither goes without the other")
    if config.dns_min_interval > config.dns_max_interval:
        raise ConfigError("dns_min_interval: must not be above dns_max_interval")
    if config.listen == OFF and (config.peers or config.peers_file or kind != "static"):
        raise ConfigError("listen: a daemon with peers cannot have it off, since they call it there")
    if kind == "etcd":
        _check_etcd(config)
    if kind in ("dns", "etcd"):
        _check_advertised(config)


def _check_etcd(config: Config) -> None:
    if not config.etcd_endpoints:
        raise ConfigError("etcd_endpoints: is missing; discovery etcd needs to know where etcd is")
    if bool(config.etcd_user) != bool(config.etcd_password_file):
        name = "etcd_password_file" if config.etcd_user else "etcd_user"
        raise ConfigError(f"{name}: is missing; a user takes etcd_user and etcd_password_file, both or neither")
    if bool(config.etcd_cert) != bool(config.etcd_key):
        name = "etcd_key" if config.etcd_cert else "etcd_cert"
        raise ConfigError(f"{name}: is missing; a certificate takes etcd_cert and etcd_key, both or neither")
    if config.etcd_cert and not config.etcd_ca:
        raise ConfigError("etcd_ca: is missing; it switches TLS on, without which etcd_cert has no effect")


def _check_advertised(config: Config) -> None:
    address = config.advertise or config.listen
    if address.startswith(UNIX):
        raise ConfigError("advertise: is missing; peers cannot reach the path that listen names")
    try:
        host = parse_peers(address)
    except ValueError as error:
        raise ConfigError(f"advertise: peers need it as an address, but {error}") from None
    if any(peer.address.rpartition(":")[0] in ("0.0.0.0", "[::]") for peer in host):  # noqa: S104
        raise ConfigError(f"advertise: must be the address that peers reach this daemon at, not {address}")


def _read(file: str) -> dict[str, str]:
    try:
        # A pipe would be waited for, for ever at a SIGHUP, when nobody writes to it any more.
        if stat.S_ISFIFO(os.stat(file).st_mode):
            raise ConfigError(f"{file}: is a pipe, which cannot be read again")
        with open(file, "rb") as stream:
            content = tomllib.load(stream)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except RecursionError:
        raise ConfigError(f"{file}: not TOML: nested too deep") from None
    except ConfigError:
        raise
    except ValueError as error:  # tomllib's own and those of what it calls: bytes that are no UTF-8, too many digits
        raise ConfigError(f"{file}: not TOML: {error}") from None
    for name, value in content.items():
        if name not in _BY_NAME:
            raise ConfigError(f"{ascii(name)[1:-1]} in {file}: no such setting{_near(name)}")
        if isinstance(value, bool) or not isinstance(value, str | int):
            kind = _TOML_TYPES.get(type(value), "a date or time")
            raise ConfigError(f"{name} in {file}: must be a string or an integer, not {kind}")
        if isinstance(value, int) and abs(value) >= _BEYOND:
            raise ConfigError(f"{name} in {file}: is beyond every setting's range")
    # TOML's own octal (0o660) comes as a number; written out in octal it is the mode that was meant.
    return {
        name: f"{value:04o}" if _BY_NAME[name].metadata["unit"] == "octal" and isinstance(value, int) else str(value)
        for name, value in content.items()
    }


def _near(name: str, prefix: str = "") -> str:
    near = difflib.get_close_matches(name, _BY_NAME, 1)
    return f"; did you mean {prefix}{near[0].upper() if prefix else near[0]}?" if near else ""
