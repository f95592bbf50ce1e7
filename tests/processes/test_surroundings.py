"""Programs in odd surroundings: environment, interpreter flags, working directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.processes.test_start_from import CLOSE, EXPECTED, PROGRAM

ODD = b"mod\xe8le"


def run(
    program: str, folder: Path, *flags: str, before: str = "", env: dict[bytes, bytes] | None = None
) -> tuple[int, str, str]:
    text = program or before + PROGRAM.format(folder=str(folder / "log"), ending=CLOSE)
    done = subprocess.run(
        [sys.executable, *flags, "-c", text],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=folder,
        env={**os.environb, **(env or {})},
    )
    return done.returncode, done.stdout, done.stderr


def test_an_environment_that_is_not_utf8(tmp_path: Path) -> None:
    program = PROGRAM.format(folder=str(tmp_path / "log"), ending=CLOSE)
    program = program.replace(":serve", ":describe").replace('payload=b"x"', "payload=b'[\"ODD\"]'")
    for fresh in (False, True):
        text = program.replace('role="Worker_0"', f'role="Worker_0", fresh={fresh}')
        code, out, error = run(text, tmp_path, env={b"ODD": ODD})
        assert (code, error) == (0, "")
        assert out.count('"ODD": "mod\\\\udce8le"') == 2


def test_isolated_with_the_package_found_by_sys_path_only(tmp_path: Path) -> None:
    assert run("", tmp_path, "-I") == (0, EXPECTED, "")
    assert run("", tmp_path, "-E", "-s") == (0, EXPECTED, "")


def test_a_removed_working_directory(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    before = f"import os; os.chdir({str(tmp_path / 'gone')!r}); os.rmdir({str(tmp_path / 'gone')!r})\n"
    assert run("", tmp_path, before=before) == (0, EXPECTED, "")
