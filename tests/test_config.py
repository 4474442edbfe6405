"""The daemon's settings: which value wins, where it came from, and what is said of a wrong one."""

from __future__ import annotations

import os
import platform
from itertools import combinations
from pathlib import Path

import pytest

from sidecar.config import SETTINGS, Config, ConfigError, check, default_of, load, shown

NAMES = [setting.name for setting in SETTINGS]


@pytest.fixture
def write(tmp_path: Path) -> Path:
    """Where a test writes its file."""
    return tmp_path / "sidegate.toml"


def refusal(
    options: dict[str, str | None] | None = None, environ: dict[str, str] | None = None, file: str | None = None
) -> str:
    """The one line that `load` refuses with."""
    with pytest.raises(ConfigError) as caught:
        load(options or {}, environ or {}, file)
    text = str(caught.value)
    assert "\n" not in text
    return text


# --- Precedence


def test_without_anything_every_setting_has_its_default() -> None:
    """An empty environment is enough, and every source is told as the default."""
    config, sources = load({}, {})
    assert sources == dict.fromkeys(NAMES, "default")
    assert config == Config()
    assert config.node == platform.node()
    assert (config.max_buckets, config.max_clock_skew, config.time_zone, config.clock) == (
        1_000_000,
        10_000,
        "UTC",
        "system",
    )
    assert {setting.name: default_of(setting) for setting in SETTINGS} == vars(config)


def test_option_before_variable_before_file_before_default(write: Path) -> None:
    """The nearest to the caller wins, and each setting tells its source."""
    write.write_text("grace = 1\nstall_timeout = 1001\nmax_frame = 2001\n")
    environ = {"SIDEGATE_STALL_TIMEOUT": "1002", "SIDEGATE_MAX_FRAME": "2002"}
    config, sources = load({"max_frame": "2003", "node": None}, environ, str(write))
    assert (config.grace, config.stall_timeout, config.max_frame) == (1, 1002, 2003)
    assert sources == {
        **dict.fromkeys(NAMES, "default"),
        "grace": str(write),
        "stall_timeout": "SIDEGATE_STALL_TIMEOUT",
        "max_frame": "option",
    }


def test_a_variable_may_name_the_file(write: Path, tmp_path: Path) -> None:
    """SIDEGATE_CONFIG names a file; one given as an option is taken instead of it."""
    write.write_text("grace = 1\n")
    other = tmp_path / "other.toml"
    other.write_text("grace = 2\n")
    config, sources = load({}, {"SIDEGATE_CONFIG": str(write)})
    assert (config.grace, sources["grace"]) == (1, str(write))
    config, sources = load({}, {"SIDEGATE_CONFIG": str(write)}, str(other))
    assert (config.grace, sources["grace"]) == (2, str(other))


@pytest.mark.parametrize("name", ["grace", "socket", "config"])
def test_an_empty_variable_is_unset(name: str) -> None:
    """Shells and compose files write an empty variable where they mean none."""
    config, sources = load({}, {f"SIDEGATE_{name.upper()}": ""})
    assert set(sources.values()) == {"default"}
    assert config == Config()


def test_an_empty_variable_leaves_the_file_in_force(write: Path) -> None:
    """An empty variable does not hide what a file says."""
    write.write_text("grace = 1\n")
    config, sources = load({}, {"SIDEGATE_GRACE": ""}, str(write))
    assert (config.grace, sources["grace"]) == (1, str(write))


@pytest.mark.parametrize(
    "variable",
    [
        "SIDEGATE_PORT",
        "SIDEGATE_SERVICE_HOST",
        "SIDEGATE_SERVICE_PORT",
        "SIDEGATE_SERVICE_PORT_GRPC",
        "SIDEGATE_PORT_1051_TCP",
        "SIDEGATE_PORT_1051_TCP_PROTO",
        "SIDEGATE_PORT_1051_TCP_PORT",
        "SIDEGATE_PORT_1051_TCP_ADDR",
        "PATH",
        "GRACE",
        "XSIDEGATE_GRACE",
    ],
)
def test_variables_that_are_none_of_ours(variable: str) -> None:
    """What Kubernetes puts beside a Service named sidegate, and what others set, is passed over."""
    config, sources = load({}, {variable: "tcp://10.0.0.1:1051"})
    assert config == Config()
    assert set(sources.values()) == {"default"}


# --- Values


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("socket", "/srv/x.sock", "/srv/x.sock"),
        ("socket", "unix:///srv/x.sock", "/srv/x.sock"),
        ("socket_mode", "0660", 0o660),
        ("socket_mode", "600", 0o600),
        ("socket_mode", "0o777", 0o777),
        ("socket_group", "www-data", "www-data"),
        ("node", "a" * 253, "a" * 253),
        ("node", "node é", "node é"),
        ("max_buckets", "1", 1),
        ("max_buckets", "100000000", 100_000_000),
        ("max_connections", "1000000", 1_000_000),
        ("max_frame", "1024", 1024),
        ("max_frame", "67108864", 64 << 20),
        ("max_clock_skew", "0", 0),
        ("time_zone", "Europe/Rome", "Europe/Rome"),
        ("time_zone", "UTC", "UTC"),
        ("clock", "system", "system"),
        ("clock", "manual:0", "manual:0"),
        ("clock", "manual:253000000000000", "manual:253000000000000"),
        ("stall_timeout", "100", 100),
        ("grace", "0", 0),
        ("listen", "0.0.0.0:65535", "0.0.0.0:65535"),
        ("listen", "[::1]:1051", "[::1]:1051"),
        ("listen", "off", "off"),
        ("listen", "unix:/srv/v1.sock", "unix:/srv/v1.sock"),
        ("http", "unix:///srv/http.sock", "unix:/srv/http.sock"),
        ("http", "off", "off"),
        ("log_level", "debug", "debug"),
        ("log_format", "console", "console"),
    ],
)
def test_values_are_read_alike_from_everywhere(name: str, text: str, value: object, write: Path) -> None:
    """An option, a variable and a file take the same text, and what is shown of it can be read again."""
    write.write_text(f'{name} = "{text}"\n')
    for config, _ in (load({name: text}, {}), load({}, {f"SIDEGATE_{name.upper()}": text}), load({}, {}, str(write))):
        assert getattr(config, name) == value
    (setting,) = (setting for setting in SETTINGS if setting.name == name)
    assert getattr(load({name: shown(setting, value)}, {})[0], name) == value


def test_peers_need_the_port_that_they_call() -> None:
    """`listen` off is for a daemon that is alone."""
    load({"listen": "off"}, {})
    with pytest.raises(ConfigError, match="listen"):
        load({"listen": "off"}, {"SIDEGATE_PEERS": "127.0.0.1:1051"})


TLS = {"tls_ca": "/ca", "tls_cert": "/cert", "tls_key": "/key"}


@pytest.mark.parametrize("given", [1, 2])
def test_tls_takes_all_three_files_or_none(given: int) -> None:
    """Whichever is missing is named; half of TLS would be none, or one that nobody checks."""
    assert load(TLS, {})[0].tls_key == "/key"
    for names in combinations(TLS, given):
        missing = next(name for name in TLS if name not in names)
        text = refusal({name: TLS[name] for name in names})
        assert text == f"{missing}: is missing; TLS takes tls_ca, tls_cert and tls_key, all three or none"


def test_a_server_name_without_tls_is_refused() -> None:
    """Who sets it believes that peers are verified."""
    assert load({**TLS, "tls_server_name": "peers.example"}, {})[0].tls_server_name == "peers.example"
    assert "has no effect without" in refusal({"tls_server_name": "peers.example"})


def test_a_file_may_hold_integers(write: Path) -> None:
    """TOML's own integers are taken as they are."""
    write.write_text("max_buckets = 5_000\ngrace = 0\n")
    config, _ = load({}, {}, str(write))
    assert (config.max_buckets, config.grace) == (5000, 0)


BAD = [
    ("socket", "unix://", "must be a path"),
    ("socket", "a\0b", "must be a path"),
    ("socket_mode", "0888", "must be an octal file mode such as 0660"),
    ("socket_mode", "7", "must be an octal file mode"),
    ("socket_mode", "rw-rw----", "must be an octal file mode"),
    ("node", "a" * 254, "must be 1 to 253 printable characters"),
    ("node", "a\nb", "must be 1 to 253 printable characters"),
    ("max_buckets", "0", "must be an integer from 1 to 100000000"),
    ("max_buckets", "100000001", "must be an integer from 1"),
    ("max_buckets", "1e6", "must be an integer"),
    ("max_buckets", "1_000", "must be an integer"),
    ("max_buckets", " 5", "must be an integer"),
    ("max_buckets", "+5", "must be an integer"),
    ("max_buckets", "\u0665", "must be an integer"),  # an Arabic five
    ("max_buckets", "9" * 5000, "must be an integer from 1 to 100000000"),  # more digits than int() reads
    ("max_connections", "0", "must be an integer from 1 to 1000000"),
    ("max_frame", "1023", "must be an integer from 1024 to 67108864"),
    ("max_frame", "67108865", "must be an integer from 1024"),
    ("max_clock_skew", "-1", "must be an integer from 0 to 86400000"),
    ("max_clock_skew", "86400001", "must be an integer from 0"),
    ("time_zone", "Rome", "must be an IANA time zone such as UTC or Europe/Rome"),
    ("time_zone", "../../etc/passwd", "must be an IANA time zone"),
    ("time_zone", "/etc/localtime", "must be an IANA time zone"),
    ("time_zone", "a\0b", "must be an IANA time zone"),
    ("clock", "manual", "must be system or manual:<epoch ms up to 253000000000000>"),
    ("clock", "manual:", "must be system or manual"),
    ("clock", "manual:-1", "must be system or manual"),
    ("clock", "manual:253000000000001", "must be system or manual"),
    ("clock", "manual:" + "9" * 5000, "must be system or manual"),
    ("clock", "system:5", "must be system or manual"),
    ("stall_timeout", "99", "must be an integer from 100 to 3600000"),
    ("grace", "600001", "must be an integer from 0 to 600000"),
    ("listen", "1051", "must be host:port, unix:/path or off"),
    ("listen", "host:0", "must be host:port, unix:/path or off"),
    ("listen", "unix:v1.sock", "must be host:port, unix:/path or off"),
    ("listen", "OFF", "must be host:port, unix:/path or off"),
    ("http", "host:65536", "must be host:port, unix:/path or off"),
    ("http", "unix:", "must be host:port, unix:/path or off"),
    ("http", "unix:/a\0b", "must be host:port, unix:/path or off"),
    ("tls_min_version", "1.1", "must be one of 1.2, 1.3"),
    ("tls_server_name", "a b", "must be a host name or an IP address"),
    ("tls_key", "a\0b", "must be a path"),
    ("log_level", "INFO", "must be one of debug, info, warning, error"),
    ("log_format", "xml", "must be one of auto, json, console"),
]


@pytest.mark.parametrize(("name", "text", "why"), BAD, ids=lambda value: ascii(value)[:24])
def test_a_bad_value_is_named(name: str, text: str, why: str) -> None:
    """One line tells the option or the variable, what it must be and what it was."""
    option, variable = f"--{name.replace('_', '-')}", f"SIDEGATE_{name.upper()}"
    for line, label in ((refusal({name: text}), option), (refusal(environ={variable: text}), variable)):
        assert line.startswith(f"{label}: {why}")
        assert line.endswith(f", not {text!r}")


@pytest.mark.parametrize(
    ("name", "text", "why"), [row for row in BAD if row[1].isprintable()], ids=lambda v: ascii(v)[:24]
)
def test_a_bad_value_in_a_file_is_named(name: str, text: str, why: str, write: Path) -> None:
    """The line names the key and the file."""
    write.write_text(f"{name} = '{text}'\n")
    with pytest.raises(ConfigError) as caught:
        load({}, {}, str(write))
    assert str(caught.value).startswith(f"{name} in {write}: {why}")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("socket_group", "peers")])
def test_an_empty_option_is_a_bad_value(name: str) -> None:
    """An option that was given empty is a mistake, not a default; only the group and the peers may be none."""
    assert refusal({name: ""}).startswith(f"--{name.replace('_', '-')}: must be ")


# --- Unknown names and files


@pytest.mark.parametrize(
    ("variable", "line"),
    [
        ("SIDEGATE_MAX_BUCKET", "SIDEGATE_MAX_BUCKET: no such setting; did you mean SIDEGATE_MAX_BUCKETS?"),
        ("SIDEGATE_SOCKETS", "SIDEGATE_SOCKETS: no such setting; did you mean SIDEGATE_SOCKET?"),
        ("SIDEGATE_ZZZ", "SIDEGATE_ZZZ: no such setting"),
        ("SIDEGATE_", "SIDEGATE_: no such setting"),
        ("SIDEGATE_grace", "SIDEGATE_grace: no such setting; did you mean SIDEGATE_GRACE?"),
    ],
)
@pytest.mark.parametrize("value", ["5", ""])
def test_an_unknown_variable_is_named_with_the_nearest(variable: str, line: str, value: str) -> None:
    """A misspelt variable stops the start, even an empty one, and the setting it resembles is told."""
    assert refusal(environ={variable: value}) == line


def test_an_unknown_key_is_named_with_the_nearest(write: Path) -> None:
    """A misspelt key stops the start, and the setting it resembles is told."""
    write.write_text("graze = 5\n")
    assert refusal(file=str(write)) == f"graze in {write}: no such setting; did you mean grace?"
    write.write_text("[server]\ngrace = 5\n")
    assert refusal(file=str(write)).startswith(f"server in {write}: no such setting")


@pytest.mark.parametrize("value", ["true", "1.5", "[1]", "{a = 1}", "2024-01-01"])
def test_a_key_of_a_wrong_type_is_named(value: str, write: Path) -> None:
    """A key holds a string or an integer."""
    write.write_text(f"grace = {value}\n")
    assert refusal(file=str(write)).startswith(f"grace in {write}: must be a string or an integer, not a")


@pytest.mark.parametrize("value", ["0x" + "f" * 5000, "-0x" + "f" * 5000, str(10**18), "[0x" + "f" * 5000 + "]"])
def test_a_number_longer_than_any_setting_takes_is_named(value: str, write: Path) -> None:
    """Also one of so many digits that Python would not write it out."""
    write.write_text(f"grace = {value}\n".replace("-0x", "0x"))
    assert refusal(file=str(write)).startswith(f"grace in {write}: ")


@pytest.mark.parametrize(
    "content",
    [
        b"grace",
        b"grace = 1\ngrace = 2\n",
        b"\xff\xfe",
        b"grace = \n",
        b"grace = " + b"[" * 100_000,
        b"grace = " + b"9" * 5000,
    ],
    ids=range(6),
)
def test_a_file_that_is_not_toml_is_named(content: bytes, write: Path) -> None:
    """One line tells the file and what is wrong in it."""
    write.write_bytes(content)
    assert refusal(file=str(write)).startswith(f"{write}: not TOML: ")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """A file that was named must be readable."""
    assert refusal(file=str(tmp_path / "gone.toml")) == f"{tmp_path / 'gone.toml'}: No such file or directory"
    assert refusal(environ={"SIDEGATE_CONFIG": str(tmp_path)}) == f"{tmp_path}: Is a directory"
    assert refusal(file="a\0b").startswith("a\0b: not TOML: ")


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    """A pipe that nobody writes to would keep a SIGHUP waiting for ever."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert refusal(file=str(pipe)) == f"{pipe}: is a pipe, which cannot be read again"


@pytest.mark.skipif(os.getuid() == 0, reason="root reads every file")
def test_a_file_that_may_not_be_read_is_named(write: Path) -> None:
    """One line tells the file and why."""
    write.write_text("grace = 1\n")
    write.chmod(0)
    assert refusal(file=str(write)) == f"{write}: Permission denied"


def test_a_strange_key_stays_one_line(write: Path) -> None:
    """A key may hold anything in TOML; the line that refuses it is one line."""
    write.write_text('"a\\nb" = 1\n')
    assert refusal(file=str(write)) == f"a\\nb in {write}: no such setting"


# --- Looking at a file alone


def test_check_tells_what_sighup_changes(write: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the manual's order, only what the file names; this process's own variables do not count."""
    monkeypatch.setenv("SIDEGATE_GRACE", "nonsense")
    write.write_text("log_level = 'debug'\nmax_buckets = 5\nfallback = 'deny'\nsocket_mode = 0o600\n")
    assert check(str(write)) == (["fallback", "log_level"], ["socket_mode", "max_buckets"])
    write.write_text("")
    assert check(str(write)) == ([], [])
    write.write_text("grace = -1\n")
    with pytest.raises(ConfigError, match="grace in "):
        check(str(write))


# --- The manual


def test_every_setting_says_what_it_does() -> None:
    """Each has a unit, an effect, a reason, and a default that is told without a look at this machine."""
    for setting in SETTINGS:
        assert setting.metadata["effect"], setting.name
        assert len(setting.metadata["reason"]) > 20, setting.name
        assert bool(setting.metadata["rule"]) or not callable(setting.default_factory), setting.name
        assert "unit" in setting.metadata
