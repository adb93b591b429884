"""The pictures of the guide's gallery, by the commands that stand beside them.

    python benchmarks/gallery.py [--work FOLDER] [--only PICTURE ...]

Every line of the page's `sh` blocks is run in order in a working folder with the recipes in it; what is there already
is not run again. Then each picture is taken from what the commands wrote, made small, and put where the page reads it.
Charts are those that reports draw for phones, as SVG that follows the reader's light or dark theme. A quiet machine
with two cores takes about a quarter of an hour.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from PIL import Image, ImageChops

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "prunekit" / "guide" / "gallery" / "index.md"
FOLDER = ROOT / "benchmarks" / "results" / "gallery"
STYLE = ROOT / "prunekit" / "report" / "templates" / "style.html"
WIDTH, PAD, GAP = 400.0, 10.0, 12.0
"""Of a chart, of its margin, and between its panels, in pixels."""
MOST = 150_000
"""Bytes of a picture."""
MARGIN, NAME = 14, 24
"""Between the panels of a picture of boxes, and the height of their names, in pixels."""
FONT = 'text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,Helvetica,Arial,sans-serif!important}'


def commands(page: str) -> list[str]:
    """Returns the lines of a page's blocks of commands, in order; one that ends with a backslash goes on."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    blocks = [re.sub(r"\s*\\\n\s*", " ", block) for block in blocks]
    return [line.split("  #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


def run(line: str, work: Path) -> None:
    """Runs a command, unless it has been run there before; `<time>` stands for the first run in its folder."""
    done = work / "done" / hashlib.sha256(line.encode()).hexdigest()[:16]
    if done.exists():
        return
    filled = re.sub(r"(\S+)/<time>", lambda found: str(first(work, found[1]).relative_to(work)), line)
    program = f"{shlex.quote(sys.executable)} -m prunekit"
    print(filled, flush=True)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PRUNEKIT_CACHE": str(work / "cache")}
    shell = re.sub(r"^prunekit\b", program.replace("\\", r"\\"), filled)
    status = subprocess.run(["bash", "-c", shell], cwd=work, env=env, check=False).returncode
    if status not in (0, 1):  # 1: a run fell short of what was asked, which its pictures do not depend on
        raise SystemExit(f"{line}: ended with {status}")
    done.parent.mkdir(exist_ok=True)
    done.touch()


def first(work: Path, folder: str) -> Path:
    """Returns the first run of a folder."""
    return min((work / folder).glob("2*"))


def chart(page: Path, section: str, panels: int | None = None, *, number: int = 0) -> str:
    """Returns the figure of a section of a page as a file of its own.

    Args:
        page: the page.
        section: its id.
        panels: how many panels to take, of a figure that has several.
        number: of the figure in its section.
    """
    html = page.read_text(encoding="utf-8").split(f'<section id="{section}">', 1)[1].split("</section>", 1)[0]
    figure = re.findall(r"<figure>(.*?)</figure>", html, re.DOTALL)[number]
    narrow = figure.split('<div class="tight">')[1] if '<div class="tight">' in figure else figure
    parts = re.findall(r"<svg [^>]*?>.*?</svg>", narrow, re.DOTALL)
    shared = "".join(_inner(part) for part in parts if 'class="shared"' in part)
    drawn = [part for part in parts if 'class="shared"' not in part]
    legends = [part for part in drawn if 'class="legend' in part]
    drawn = [*legends, *[part for part in drawn if part not in legends][:panels]]
    label = re.findall(r'aria-label="([^"]*)"', figure)[0]
    columns, space = (2 if 'class="panels small' in narrow else 1), WIDTH - 2 * PAD
    placed, top = [], PAD
    for number, part in enumerate(drawn, -len(legends)):
        box = [float(value) for value in re.findall(r'viewBox="([^"]*)"', part)[0].split()]
        most = (space - GAP * (columns - 1)) / columns
        width, column = (min(space, box[2] * 1.3), 0) if part in legends else (most, number % columns)
        height = width * box[3] / box[2]
        view, left = " ".join(f"{value:g}" for value in box), PAD + column * (most + GAP)
        place = f'x="{left:g}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" viewBox="{view}"'
        placed.append(f"<svg {place}>{_inner(part)}</svg>")
        last = part is drawn[-1] or part in legends or column == columns - 1
        top += height + GAP if last else 0
    height = top - GAP + PAD
    return _small(
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="{WIDTH:g}" '
        f'height="{height:.0f}" viewBox="0 0 {WIDTH:g} {height:.0f}" role="img" aria-label="{label}">'
        f"<style>{theme(lit='lit' in narrow.split('>')[0])}{FONT}</style>"
        f'<rect width="100%" height="100%" rx="6" fill="var(--paper)"/>{shared}{"".join(placed)}</svg>'
    )


def theme(*, lit: bool) -> str:
    """Returns the variables of the pages' colors, light and dark; of a chart with a scale of colors the light ones."""
    light, dark = re.findall(r":root \{(.*?)\}", STYLE.read_text(encoding="utf-8"))
    found = f":root{{{light.replace('color-scheme: light dark;', '')}}}"
    return found if lit else f"{found}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"


def _inner(part: str) -> str:
    return part.split(">", 1)[1].removesuffix("</svg>")


def _small(text: str) -> str:
    """Returns a drawing without spaces between its elements, and with two decimals."""
    text = re.sub(r"(\.\d\d)\d+", r"\1", text)
    text = re.sub(r">\s+<", "><", re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL))
    return re.sub(r"\n\s*", " ", text) + "\n"


def picture(made: Path | Image.Image) -> bytes:
    """Returns a picture as a small PNG; a large one gets at most 256 colors."""
    image = (made if isinstance(made, Image.Image) else Image.open(made)).convert("RGB")
    for shown in (image, image.quantize(256)):
        stream = io.BytesIO()
        shown.save(stream, "PNG", optimize=True)
        if stream.tell() < MOST:
            break
    return stream.getvalue()


def boxes(folder: Path, count: int = 2) -> bytes:
    """Returns the last two panels, dense and pruned, of the images of a run with the most labeled boxes."""
    images = json.loads((folder / "detections.json").read_text(encoding="utf-8"))["images"]
    most = sorted(images, key=lambda image: -int(image["boxes"]["labeled"]))[:count]
    pages = [Image.open(folder / str(image["picture"])) for image in most]
    side = (pages[0].width - MARGIN) // 3 - MARGIN  # of a panel; the images are square
    size = 2 * (side + MARGIN), side + NAME
    made = Image.new("RGB", (size[0] + MARGIN, count * (size[1] + MARGIN)), "white")
    for row, page in enumerate(pages):
        bottom = page.height - MARGIN
        panels = page.crop((page.width - MARGIN - size[0], bottom - size[1], page.width - MARGIN, bottom))
        made.paste(panels, (0, row * (size[1] + MARGIN)))
    return picture(made)


def head(page: Path, work: Path) -> bytes:
    """Returns the sentence and the figures at the top of a report, as a browser shows them."""
    browser = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)
    if browser is None:
        raise SystemExit("expected chromium or google-chrome on PATH, which takes the picture of a report")
    only = "<style>main > :not(.lead, .tiles), .contents { display: none; }</style></head>"
    shown, taken = work / "head.html", work / "head.png"
    shown.write_text(page.read_text(encoding="utf-8").replace("</head>", only), encoding="utf-8")
    size = ("--window-size=640,800", "--force-device-scale-factor=1.5", f"--screenshot={taken}")
    options = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={work / 'profile'}",
    )
    subprocess.run([browser, *options, *size, shown.as_uri()], check=True, capture_output=True)
    image = Image.open(taken).convert("RGB")
    box = ImageChops.difference(image, Image.new("RGB", image.size, image.getpixel((0, 0)))).getbbox()
    if box is None:
        raise SystemExit(f"{page}: expected a report with figures at its top")
    image.crop((box[0] - 12, box[1] - 12, box[2] + 12, box[3] + 12)).save(taken)
    return picture(taken)


def pictures(work: Path) -> Iterator[tuple[str, Callable[[], str | bytes]]]:
    """Yields the name of each picture and what makes it."""
    main = partial(first, work, "runs/resnet34")
    yield "widths.svg", lambda: chart(main() / "report.html", "widths")
    yield "coupling.svg", lambda: chart(main() / "report.html", "coupling")
    yield "training.svg", lambda: chart(main() / "report.html", "curves")
    yield "boxes.png", lambda: boxes(first(work, "runs/yolo-coco8") / "detections")
    yield "pareto.svg", lambda: chart(work / "comparison.html", "pareto", 2)
    yield "staircase.svg", lambda: chart(first(work, "runs/resnet34/profile") / "report.html", "layers", 3)
    yield "time.svg", lambda: chart(work / "why" / "explain.html", "modules")
    yield "../report.png", lambda: head(main() / "report.html", work)


def main() -> None:
    """Runs the commands and writes the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "gallery", help="working folder, kept")
    parser.add_argument("--only", nargs="+", metavar="PICTURE", help="of what the working folder has; runs nothing")
    options = parser.parse_args()
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    shutil.copytree(ROOT / "recipes", work / "recipes", dirs_exist_ok=True)
    if not options.only:
        for line in commands(PAGE.read_text(encoding="utf-8")):
            run(line, work)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, make in pictures(work):
        if options.only and name not in options.only:
            continue
        made = make()
        data = made.encode() if isinstance(made, str) else made
        (FOLDER / name).write_bytes(data)
        print(f"{name}: {len(data):,} bytes{'' if len(data) < MOST else ', which is too much'}")


if __name__ == "__main__":
    main()
