"""Writes the last column of docs/reliability.md: how much the tests that are named there tried.

Usage: python docs/generate_reliability.py

Runs the named tests as `make test` does, counts their cases, and adds up what each notes by itself
(the fixture ``tried``). Where one fails nothing is written.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reliability.md"
TEST = re.compile(r"`(tests/\w+\.py)(?:::(\w+))?`")
Key = tuple[str, str]
"""File and name of a test; without a name all of the file."""


def main() -> None:
    """Run the tests that the page names, and write the page."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    names = list(dict.fromkeys("::".join(filter(None, m)) for m in TEST.findall("\n".join(lines))))
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow"]
        command += [f"--junitxml={report}", "-o", "junit_family=xunit1"]
        subprocess.run([*command, *names], cwd=ROOT, check=True)
        cases, tried = counted(report)
    PAGE.write_text("\n".join(row(line, cases, tried) for line in lines) + "\n", encoding="utf-8")


def counted(report: Path) -> tuple[Counter[Key], dict[Key, Counter[str]]]:
    """Cases of each test, and by what was tried how often."""
    cases: Counter[Key] = Counter()
    tried: dict[Key, Counter[str]] = defaultdict(Counter)
    for case in ElementTree.parse(report).iter("testcase"):
        file = f"tests/{case.attrib['classname'].rpartition('.')[2]}.py"
        if case.find("skipped") is not None:
            continue
        for key in ((file, case.attrib["name"].partition("[")[0]), (file, "")):
            cases[key] += 1
            for noted in case.iter("property"):
                tried[key][noted.attrib["name"]] += int(noted.attrib["value"])
    return cases, tried


def row(line: str, cases: Counter[Key], tried: dict[Key, Counter[str]]) -> str:
    """A line of the page, with what its tests tried where it is a row of the table."""
    keys = TEST.findall(line)
    if not line.startswith("|") or not keys:
        return line
    count = sum(cases[key] for key in keys)
    if not count:
        raise SystemExit(f"no test ran of: {line}")
    parts = [f"{count:,} case{'s' * (count > 1)}"]
    noted: Counter[str] = sum((tried[key] for key in keys), Counter())
    parts += [f"{number:,} {what}" for what, number in noted.items()]
    promise, tests = line.strip("| ").split(" | ")[:2]
    return f"| {promise} | {tests} | {', '.join(parts)} |"


if __name__ == "__main__":
    main()
