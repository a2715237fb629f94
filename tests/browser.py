"""A real browser for tests of pages: what it measures in one, what it draws of one."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

CHROMIUM = next(
    (
        found
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (found := shutil.which(name))
    ),
    None,
)

MEASURE = """
<script>
window.addEventListener("load", () => {
  const wide = [], out = [], overlaps = [], box = e => e.getBoundingClientRect();
  for (const e of document.querySelectorAll("body *")) {
    if (e.closest("svg") || e.parentElement.closest(".scroll")) continue;
    if (box(e).right > innerWidth + 0.5) wide.push(e.tagName + "." + e.className);
  }
  for (const svg of document.querySelectorAll("svg")) {
    const frame = box(svg);
    if (!frame.width) continue;
    const texts = [...svg.querySelectorAll("text")].filter(t => t.textContent.trim());
    const boxes = texts.map(box);
    boxes.forEach((b, i) => {
      const name = svg.querySelector("title").textContent + ": " + texts[i].textContent;
      if (b.left < frame.left - 2 || b.right > frame.right + 2 || b.bottom > frame.bottom + 2)
        out.push(name);
      for (let j = 0; j < i; j++) {
        const o = boxes[j];
        const across = Math.min(b.right, o.right) - Math.max(b.left, o.left);
        const down = Math.min(b.bottom, o.bottom) - Math.max(b.top, o.top);
        if (across > 1 && down > 4) overlaps.push(name + " | " + texts[j].textContent);
      }
    });
  }
  const scrolled = [...document.querySelectorAll(".scroll")]
    .filter(e => e.scrollWidth > e.clientWidth)
    .map(e => e.getAttribute("aria-labelledby") + (e.matches(".huge") ? " huge" : ""));
  const anchors = [...document.querySelectorAll("a[href^='#']")];
  const found = {
    width: innerWidth, page: document.documentElement.scrollWidth, wide, out, overlaps, scrolled,
    figures: document.querySelectorAll("figure svg").length,
    scripts: document.scripts.length, images: document.images.length,
    requests: performance.getEntriesByType("resource").map(e => e.name),
    dead: anchors.map(a => a.hash).filter(h => !document.getElementById(h.slice(1))),
    anchors: anchors.length, told: window.noted,
  };
  const note = parent.document.createElement("pre");
  note.id = "measured-" + window.name; note.textContent = JSON.stringify(found);
  parent.document.documentElement.append(note);
});
</script>
"""


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Start the browser without a window, with a profile of its own in ``folder``."""
    return subprocess.run(
        [
            str(CHROMIUM),
            *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            f"--user-data-dir={folder / 'profile'}",
            *options,
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


def measure(folder: Path, *pages: tuple[str, int]) -> list[dict[str, Any]]:
    """Findings of the browser in pages, each at its width: overflow, collisions, requests, anchors.

    A page's content security policy forbids scripts; the copy that is measured has none. It
    stands in a frame, because windows have a smallest width, and beside the others, because to
    start a browser takes a second. What a script of the page itself leaves in ``window.noted`` is
    among the findings.
    """
    frames = []
    for number, (page, width) in enumerate(pages):
        opened, closed = re.subn(r"<meta http-equiv=[^>]*>", "", page)
        assert closed == 1
        opened = html.escape(opened.replace("</head>", f"{MEASURE}</head>"))
        style = f"border: 0; width: {width}px; height: 2000px"
        frames.append(f'<iframe name="{number}" style="{style}" srcdoc="{opened}"></iframe>')
    host = folder / "measured.html"
    host.write_text(
        f'<!DOCTYPE html><meta charset="utf-8">{"".join(frames)}',
        encoding="utf-8",
    )
    dom = run(folder, "--window-size=1200,2000", "--dump-dom", f"file://{host}").stdout
    found = dict(re.findall(r'<pre id="measured-(\d+)">(.*?)</pre>', dom, re.DOTALL))
    return [json.loads(html.unescape(found[str(number)])) for number in range(len(pages))]


def as_printed(page: str) -> str:
    """The page with its rules for print in force on the screen."""
    return page.replace("@media print", "@media all")


def screenshot(page: Path, target: Path, width: int, *, dark: bool = False) -> Path:
    """A PNG of the upper part of a page."""
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    run(
        target.parent,
        *scheme,
        f"--window-size={width},4000",
        f"--screenshot={target}",
        f"file://{page}",
    )
    return target


def pdf(page: Path, target: Path) -> bytes:
    """The page as it is printed."""
    run(target.parent, "--no-pdf-header-footer", f"--print-to-pdf={target}", f"file://{page}")
    return target.read_bytes()
