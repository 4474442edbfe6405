"""Settings read anew while the daemon runs: all that can change without a restart changes at once, or nothing does.

Decides when the settings are read, that one mistake keeps every old value, and what is said of it.  Knows no setting:
whoever can change one at run time adds a row for it, with how to prepare the change and how to make it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeAlias

from sidecar.config import SETTINGS, Config, ConfigError

Prepare: TypeAlias = Callable[[Config], Awaitable[Callable[[], None] | None]]
"""What makes the change to the settings it is given: it does all that takes a while or may fail, changes nothing, and
gives back the plain call that makes the change, which cannot fail.  None: this change needs a restart.  Raises
ConfigError or OSError to refuse."""


class Reload:
    """The table of what can be changed at run time; a call asks for the settings to be read anew.

    config: the settings in force; `config` keeps them.  read: those that are written now; raises ConfigError.
    tell: told True as a reading begins, and False when it has ended, whatever came of it.
    Nothing is read before `start`, nor after `stop`; what was asked for before is done then.  A call while one
    reading is under way asks for one more after it, so that the last one written counts and no two mix.
    """

    def __init__(
        self, config: Config, read: Callable[[], Config], log: Any, tell: Callable[[bool], None] = lambda _: None
    ) -> None:
        self.config = config
        self._tell = tell
        self._read = read
        self._log = log
        self._rows: list[tuple[tuple[str, ...], Prepare]] = []
        self._asked = False
        self._open = False
        self._task: asyncio.Task[None] | None = None

    @property
    def names(self) -> frozenset[str]:
        """The settings that some row changes."""
        return frozenset(name for names, _ in self._rows for name in names)

    def add(self, names: tuple[str, ...], prepare: Prepare) -> None:
        """A row: these settings are changed so.  Rows are asked at every reading, in the order in which they came,
        changed or not: a file may have another content at the same path."""
        self._rows.append((names, prepare))

    def __call__(self) -> None:
        """Read anew, soon."""
        self._asked = True
        self._begin()

    def start(self) -> None:
        """Do from now on what is asked for."""
        self._open = True
        self._begin()

    def stop(self) -> None:
        """Change nothing any more; a reading under way is dropped."""
        self._open = False
        if self._task is not None:
            self._task.cancel()

    def _begin(self) -> None:
        if self._asked and self._open and self._task is None:
            self._asked = False
            self._tell(True)
            self._task = asyncio.get_running_loop().create_task(self._take())
            self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if self._open:
            self._tell(False)
        if not task.cancelled() and (fault := task.exception()) is not None:
            self._log.error("reload_failed", reason=f"a fault of ours: {fault!r}", exc_info=fault)
        self._begin()

    async def _take(self) -> None:
        try:
            # Off the loop: a file on a slow disk must not keep clients waiting.
            new = await asyncio.to_thread(self._read)
            rows = [(names, await prepare(new)) for names, prepare in self._rows]
        except (ConfigError, OSError) as error:
            self._log.error("reload_failed", reason=str(error))
            return
        old = self.config
        changed = [setting.name for setting in SETTINGS if getattr(new, setting.name) != getattr(old, setting.name)]
        takes = {name for names, change in rows if change is not None for name in names}
        for _, change in rows:
            if change is not None:
                change()
        self.config = replace(old, **{name: getattr(new, name) for name in takes})
        self._log.info("settings_read_again", changed=[name for name in changed if name in takes])
        left = [name for name in changed if name not in takes]
        if left:
            self._log.warning("restart_needed", settings=left)
