"""A real browser, where there is one: what it makes of a page."""

import html
import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
WIDTHS = (1280, 400)
# Put at the end of a page by the tests only: what is laid out, everything unfolded, as the title.
_MEASURE = """<script>
document.querySelectorAll("details").forEach(folded => folded.open = true);
const outside = (inner, outer) => inner.left < outer.left - 1 || inner.right > outer.right + 1 ||
  inner.top < outer.top - 1 || inner.bottom > outer.bottom + 1;
document.title = JSON.stringify({
  width: innerWidth, scroll_width: document.documentElement.scrollWidth,
  num_tables: document.querySelectorAll("table").length, num_plots: document.querySelectorAll("svg").length,
  cut_off: [...document.querySelectorAll("h1, h2, h3, p, summary")]
    .filter(e => e.getBoundingClientRect().right > innerWidth)
    .concat([...document.querySelectorAll("svg text")]
      .filter(e => outside(e.getBoundingClientRect(), e.ownerSVGElement.getBoundingClientRect())))
    .map(e => e.textContent)})</script>"""


@dataclass(frozen=True, kw_only=True)
class Look:
    """How a page is laid out, lengths in CSS pixels.

    Attributes:
        cut_off: texts that stick out of the window or of their plot.
        console: what the browser's console says.
    """

    width: int
    scroll_width: int
    num_tables: int
    num_plots: int
    cut_off: list[str]
    console: str


def look(page: str, folder: Path) -> list[Look]:
    """What a browser makes of a page at each of :data:`WIDTHS`; ``folder`` is for its files."""
    (folder / "page.html").write_text(page.replace("</body>", _MEASURE + "</body>"))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--user-data-dir={folder}/user"]
    # The window of a headless browser is at least 500 wide: pages are shown in frames.
    frames = "".join(f'<iframe src="page.html" width="{width}" height="900"></iframe>' for width in WIDTHS)
    script = "onload = () => setTimeout(() => document.title = JSON.stringify([...document.querySelectorAll('iframe')]"
    script += ".map(frame => frame.contentDocument.title)), 100)"
    (folder / "frames.html").write_text(f"<!doctype html><title>-</title>{frames}<script>{script}</script>")
    done = subprocess.run(
        [
            *(str(CHROMIUM), *flags, "--allow-file-access-from-files", f"--window-size={sum(WIDTHS) + 60},1000"),
            *("--virtual-time-budget=3000", "--dump-dom", (folder / "frames.html").as_uri()),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    title = done.stdout.partition("<title>")[2].partition("</title>")[0]
    console = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    return [Look(**json.loads(found), console=console) for found in json.loads(html.unescape(title))]


def check(page: str, folder: Path, *, num_tables: int, num_plots: int) -> None:
    """That a page has at least so much on it, and is usable at each of :data:`WIDTHS`."""
    for width, found in zip(WIDTHS, look(page, folder), strict=True):
        assert found.console == ""
        assert found.width == width
        assert found.scroll_width <= width
        assert found.num_tables >= num_tables
        assert found.num_plots >= num_plots
        assert found.cut_off == []
