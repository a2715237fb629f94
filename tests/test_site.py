"""Refusals of `make site`: it must see a broken link, or its silence says nothing."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def build(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Build a site of one page with the settings of ours, as `make site` does."""
    (folder / "docs").mkdir(exist_ok=True)
    (folder / "docs/index.md").write_text(f"# A page\n\n{text}\n")
    (folder / "mkdocs.yml").write_text(
        f"INHERIT: {ROOT / 'mkdocs.yml'}\nnav: [index.md]\nplugins: [search]\nextra_css: []\n"
    )
    recipe = re.search(r"\$\(BIN\)/mkdocs (.*)", (ROOT / "Makefile").read_text())
    assert recipe is not None
    command = [sys.executable, "-m", "mkdocs", *shlex.split(recipe[1])]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_page_without_faults_is_built(tmp_path: Path) -> None:
    done = build(tmp_path, "[here](index.md#a-page)")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site/index.html").is_file()


def test_a_link_that_leads_nowhere_is_an_error(tmp_path: Path) -> None:
    links = ["gone.md", "#gone", "index.md#lost", "../gone.py"]
    done = build(tmp_path, "\n".join(f"[there]({link})" for link in links))
    assert done.returncode == 1
    for part in ("'gone.md'", "'#gone'", "#lost'", "'../gone.py'"):
        assert part in done.stderr


def test_a_page_that_the_navigation_lacks_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/forgotten.md").write_text("# Forgotten\n")
    done = build(tmp_path, "Nothing.")
    assert done.returncode == 1
    assert "forgotten.md" in done.stderr
