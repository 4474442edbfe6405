"""The manual of the settings, docs/configuration.md, written from the dataclass that is the manual in the code.

Decides the page's form alone; what is said of a setting stands in config.py.  `make docs` writes the page, `make check`
fails where it differs.  Nothing in it depends on the machine that writes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import Field
from typing import Any

from sidecar.config import FILE_VARIABLE, PREFIX, SETTINGS, default_text

_HEAD = f"""# Configuration

<!-- Written by `make docs` from sidecar/config.py; change it there. -->

Every setting of `sidegate serve` is an option (`--max-buckets`), a variable (`{PREFIX}MAX_BUCKETS`) and a key of a TOML
file (`max_buckets = 1_000_000`), which `--config` or `{FILE_VARIABLE}` names. An option wins over a variable, a
variable over the file, the file over the default; an empty variable counts as unset. An unknown name, a value out of
range or a file that cannot be read stops the start with one line and exit status 2.

- `sidegate config` shows the settings in force and where each came from.
- `sidegate config --check FILE` looks at a file alone, without this process's variables: exit status 0 and `ok`, with
  what SIGHUP changes of it and what needs a restart, or exit status 2 and one line that names the fault. No daemon is
  started or asked.
- **SIGHUP** has the daemon read its file again. The settings marked so below change at once, all of them or, if there
  is one mistake anywhere, none (`reload_failed`); no request fails for it. Any other changed setting is named
  (`restart_needed`) and left as it was. What an option or a variable says wins then too, so keep what you want to
  change in the file.
"""


def render() -> str:
    """The page as Markdown, with a newline at its end."""
    table = "\n".join(("| setting | default | unit | SIGHUP |", "|---|---|---|---|", *map(_row, SETTINGS)))
    return "\n".join((_HEAD, table, "", *map(_section, SETTINGS)))


def _row(setting: Field[Any]) -> str:
    name, unit = setting.name, setting.metadata["unit"]
    return f"| [`{name}`](#{name}) | {default_text(setting)} | {unit} | {_sighup(setting)} |"


def _section(setting: Field[Any]) -> str:
    lines = (
        ("Effect", setting.metadata["effect"]),
        ("Default", default_text(setting)),
        ("Unit", setting.metadata["unit"]),
        ("Takes", takes(setting)),
        ("SIGHUP", _sighup(setting)),
        ("Why", setting.metadata["reason"]),
    )
    return "\n".join((f"## {setting.name}", "", *_told(lines), ""))


def _told(lines: Iterable[tuple[str, str]]) -> Iterable[str]:
    return (f"- {label}: {text}" for label, text in lines if text)


def _sighup(setting: Field[Any]) -> str:
    return "changes it" if setting.metadata["reloadable"] else "needs a restart"


def takes(setting: Field[Any]) -> str:
    """What values a setting takes, in the words in which it refuses others; "" where those would not tell."""
    try:
        setting.metadata["parse"]("\0")
    except ValueError as error:
        _, must, rule = str(error).partition("must be ")
        return rule if must else ""
    return ""


if __name__ == "__main__":
    print(render(), end="")
