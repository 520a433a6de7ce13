"""README and .ci/run name the same two commands, so that what a newcomer types is what is tested."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent


def commands_of_ci() -> list[str]:
    return re.findall(r"^(?:main_job|tests)='(.+)'$", (ROOT / ".ci/run").read_text(), re.MULTILINE)


def test_ci_runs_two_commands_and_the_readme_shows_both_as_whole_lines() -> None:
    commands = commands_of_ci()
    lines = [line.strip() for line in (ROOT / "README.md").read_text().splitlines()]
    assert len(commands) == 2
    for command in commands:
        assert command in lines


def test_every_install_command_of_the_readme_is_run_by_ci() -> None:
    shown = re.findall(r"^ *(pip install -e .*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert sorted(shown) == sorted(commands_of_ci())


def test_ci_is_a_valid_executable_script() -> None:
    subprocess.run(["bash", "-n", ROOT / ".ci/run"], check=True)
    assert (ROOT / ".ci/run").stat().st_mode & 0o111
