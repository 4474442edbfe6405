"""The page that is written from the settings' dataclass, and the table that maps Gubernator's settings to them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sidecar import manual
from sidecar.config import SETTINGS, default_of, shown

DOCS = Path(__file__).parent.parent / "docs"


def test_the_page_in_docs_is_what_the_code_says() -> None:
    """docs/configuration.md is the manual as it would be written now; `make docs` writes it."""
    assert (DOCS / "configuration.md").read_text() == manual.render()


def test_every_setting_has_its_section() -> None:
    """With its effect, its default, its unit, what SIGHUP does and why one would change it."""
    sections = re.split(r"^## ", manual.render(), flags=re.MULTILINE)[1:]
    assert [section.split("\n", 1)[0] for section in sections] == [setting.name for setting in SETTINGS]
    for setting, section in zip(SETTINGS, sections, strict=True):
        data = setting.metadata
        assert f"- Effect: {data['effect']}\n" in section
        assert f"- Why: {data['reason']}\n" in section
        assert f"- SIGHUP: {'changes it' if data['reloadable'] else 'needs a restart'}\n" in section
        assert (f"- Unit: {data['unit']}\n" in section) == bool(data["unit"])
        if data["rule"]:
            assert f"- Default: {data['rule']}\n" in section
        else:
            assert f"- Default: {shown(setting, default_of(setting)) or 'none'}\n" in section


def test_the_page_is_the_same_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No default that is found on the machine stands in it as a value."""
    page = manual.render()
    for setting in SETTINGS:
        if callable(setting.default_factory):
            monkeypatch.setattr(setting, "default_factory", lambda: pytest.fail("the machine was asked"))
    monkeypatch.setenv("SIDEGATE_SOCKET", "/elsewhere/x.sock")
    assert manual.render() == page


def test_what_a_setting_takes_is_what_it_refuses_by() -> None:
    """The manual's bounds come from the words in which a bad value is refused."""
    by_name = {setting.name: manual.takes(setting) for setting in SETTINGS}
    assert by_name["grace"] == "an integer from 0 to 600000"
    assert by_name["fallback"] == "one of error, local, allow, deny"
    assert by_name["socket_group"] == ""


def test_gubernators_settings_map_to_ours_that_exist() -> None:
    """Each GUBER_ name stands in one row, which names a setting that we have, or says why there is none."""
    rows = re.findall(
        r"^\| `(GUBER_\w+)` \| (.*) \| (.*) \|$", (DOCS / "gubernator-settings.md").read_text(), re.MULTILINE
    )
    names = [name for name, _, _ in rows]
    assert len(names) > 60
    assert len(names) == len(set(names))
    known = {setting.name for setting in SETTINGS}
    for name, ours, remark in rows:
        assert ours == "none" or re.fullmatch(r"`\w+`(, `\w+`)*", ours), name
        assert set(re.findall(r"`(\w+)`", ours)) <= known, name
        assert remark or ours != "none", f"{name} has none, and no reason is given"
