"""Pages in a real browser, where there is one: nothing on the console, no request, tables that sort."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from synthetic_run import write_run
from test_profile_page import layer, write_profile_folder
from test_sensitivity_page import curve_rows, write_analysis

import prunekit.report
from prunekit.report.pages.compare_page import write_comparison
from prunekit.report.pages.run_page import write_report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome on PATH")
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-extensions", "--enable-logging=stderr",
)  # fmt: skip
TABLE = """<!doctype html><table class="sortable"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>
<script>{script}</script><script>
const said = [], button = (column) => document.querySelectorAll("th button")[column];
for (const column of [0, 1, 2, 3]) for (const _ of [1, 2, 3]) {{
  button(column).click();
  const sorted = [...document.querySelectorAll("th")].map((heading) => heading.getAttribute("aria-sort"));
  said.push([column, sorted[column], [...document.querySelectorAll("tbody tr")].map((row) => row.id).join("")]);
}}
said.push([button(1).title, document.querySelectorAll("[aria-sort]").length, document.querySelectorAll("abbr").length]);
document.body.dataset.said = JSON.stringify(said);
</script>"""
CELLS = {
    "a": ("fc", "9.4 MB", "64 → 32", "−0.5"),
    "b": ("conv10", "21.3 k", "8 → 7", "–"),
    "c": ("conv2", "1.9 G", "512 → 1,024", "+1.25"),
    "d": ("conv2", "", "1 → 1", "0"),
}


def browse(page: Path, profile: Path, *options: str) -> tuple[str, str]:
    """What a browser prints of a page, and what it logs."""
    command = [str(BROWSER), *OPTIONS, f"--user-data-dir={profile}", *options, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("several", [False, True], ids=["report", "comparison"])
def test_a_page_is_quiet_and_asks_for_nothing(tmp_path: Path, several: bool) -> None:
    runs = [write_run(tmp_path / name, groups=2) for name in ("a", "b")]
    page, log = tmp_path / "page.html", tmp_path / "net.json"
    if several:
        for run in runs:
            (run / "report.html").touch()
        write_comparison(runs, page)
    else:
        page = write_report(runs[0])
    shown, said = browse(page, tmp_path / "profile", "--dump-dom", f"--log-net-log={log}")
    assert "CONSOLE" not in said
    assert shown.count("<th><button") > 3  # its script ran: the policy let it
    # Requests of the browser's own, for its maker, do not come from the page.
    asked = set(re.findall(r'"url":"([a-z]+:[^"]*)"', log.read_text(encoding="utf-8", errors="replace")))
    assert {url for url in asked if "google" not in url and not url.startswith(("file:", "data:", "chrome"))} == set()


@pytest.mark.slow
@pytest.mark.parametrize(("width", "signs"), [(500, True), (1400, False)])
def test_what_is_wider_than_the_screen_says_so(tmp_path: Path, width: int, signs: bool) -> None:
    page = write_report(write_run(tmp_path / "run", groups=2))
    shown, _ = browse(page, tmp_path / "profile", "--dump-dom", f"--window-size={width},900")
    assert ('<div class="scroll wide after"' in shown) == signs
    assert ('aria-label="Contents">\n<details open=""' in shown) == (not signs)
    assert '<div class="copyable"><pre class="command"' in shown
    assert '<figure class="wide' not in shown  # panels are stacked, and figures of one panel are drawn for phones too


@pytest.mark.slow
def test_figures_of_analyses_fit_a_phone(tmp_path: Path) -> None:
    """The table of errors, and staircases; gradients are drawn for both by the same function."""
    curves = write_analysis(tmp_path / "sensitivity", curve_rows(6, measured=True))
    fits = write_profile_folder(tmp_path / "profile", [layer(name, ms) for name, ms in (("a", 1e-4), ("b", 2e-4))])
    for folder, figures in ((curves, 1), (fits, 2)):
        shown, _ = browse(write_report(folder), tmp_path / "profile-of-it", "--dump-dom", "--window-size=500,900")
        assert shown.count("<figure") == figures
        assert '<figure class="wide' not in shown


@pytest.mark.slow
def test_tables_sort_by_numbers_with_prefixes_and_by_names(tmp_path: Path) -> None:
    heads = '<th>name</th><th><abbr tabindex="0" title="how">size</abbr></th><th>width</th><th>points</th>'
    rows = "".join(
        f'<tr id="{row}">{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>' for row, cells in CELLS.items()
    )
    script = (Path(prunekit.report.__file__).with_name("templates") / "sort.js").read_text(encoding="utf-8")
    page = tmp_path / "table.html"
    page.write_text(TABLE.format(heads=heads, rows=rows, script=script), encoding="utf-8")
    shown, said = browse(page, tmp_path / "profile", "--dump-dom")
    assert "CONSOLE" not in said
    found = re.search(r'data-said="([^"]*)"', shown)
    assert found is not None
    *orders, facts = json.loads(found[1].replace("&quot;", '"'))
    assert [order for _, _, order in orders] == [
        "cdba", "abcd", "abcd",  # by name: conv2 before conv10, the same name in the order as written
        "bacd", "cabd", "abcd",  # what is missing stays last
        "dbac", "cabd", "abcd",
        "adcb", "cdab", "abcd",
    ]  # fmt: skip
    assert [sort for _, sort, _ in orders] == ["ascending", "descending", None] * 4
    assert facts == ["how", 0, 0]
