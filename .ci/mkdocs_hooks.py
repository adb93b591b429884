"""What the site has beside the guide's pages: pages made from code and notebooks, and files that pages link to.

The pages are plain Markdown whose links lead through the repository, so that they can be read there as well. A link to
a file outside the guide takes that file into the site.
"""

from __future__ import annotations

import ast
import json
import os
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
GUIDE = ROOT / "prunekit" / "guide"
LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?(\))")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
ENTRY = re.compile(r"^- (`pk\.(\w+)[^`\n]*`)", re.MULTILINE)
"""A line of the page by topic, and the name that it explains."""
BY_TOPIC = "reference/api.md"
TAKEN = ("CHANGELOG.md", "benchmarks/README.md")
"""Pages of the navigation that are not in the guide."""
README = "repository.md"
"""Where the repository's own page is in the site, which has a home of its own."""
OPTIONS = "    options:\n      heading: {heading}\n      toc_label: {name}\n"


class Examples(griffe.Extension):
    """Docstrings call their section `Example:`; what the reader of docstrings knows is `Examples:`."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rename the section of a docstring."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Name the repository where a host's continuous integration says it."""
    name, server = os.environ.get("GITHUB_REPOSITORY"), os.environ.get("GITHUB_SERVER_URL")
    if name and server:
        config.repo_url, config.repo_name = f"{server}/{name}", name
        owner, _, short = name.partition("/")
        config.site_url = config.site_url or f"https://{owner}.github.io/{short}/"
    config.watch.append(str(ROOT / "prunekit"))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the made pages, and all files of the repository that pages lead to, one after another."""
    notebooks = {site_name(path): notebook_page(path) for path in sorted(GUIDE.rglob("*.ipynb"))}
    made = {"reference/python.md": python_page(), "reference/commands.md": commands_page(), **notebooks}
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    to_read = [Path(str(file.abs_src_path)) for file in files.documentation_pages() if file.abs_src_path]
    outside = [ROOT / name for name in TAKEN]
    seen: set[Path] = set()
    while to_read or outside:
        for path in outside:
            if path not in seen and path.is_file() and not path.is_relative_to(GUIDE):
                seen.add(path)
                files.append(File.generated(config, site_name(path), abs_src_path=str(path)))
                to_read += [path] * (path.suffix == ".md")
        outside = [target for path in to_read for target in targets(path)]
        to_read = []
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead through the site where they led through the repository."""
    source = page.file.abs_src_path
    if source is None or not Path(source).is_relative_to(ROOT):
        return markdown
    here, at = Path(source).parent, Path(page.file.src_uri).parent

    def led(match: re.Match[str]) -> str:
        to = match[2]
        if "://" in to or to.startswith("mailto:"):
            return match[0]
        target = found(here / to)
        return f"{match[1]}{os.path.relpath(site_name(target), at)}{match[3] or ''}{match[4]}"

    if page.file.src_uri == BY_TOPIC:
        known = places()
        markdown = ENTRY.sub(lambda entry: f"- [{entry[1]}](python.md#{known[entry[2]]})", markdown)
    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else LINK.sub(led, part) for part in parts)


def targets(path: Path) -> list[Path]:
    """Return the files that a page links to."""
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    return [found(path.parent / match[2]) for match in LINK.finditer(text) if "://" not in match[2]]


def found(path: Path) -> Path:
    """Return the file that a link means; of a folder its page."""
    path = Path(os.path.normpath(path))
    pages = (path / name for name in ("index.md", "README.md"))
    return next((page for page in pages if page.is_file()), path) if path.is_dir() else path


def site_name(path: Path) -> str:
    """Return where a file of the repository is in the site; of a notebook its page."""
    inside = path.relative_to(GUIDE if path.is_relative_to(GUIDE) else ROOT)
    inside = inside.with_suffix(".md") if inside.suffix == ".ipynb" else inside
    return README if inside == Path("README.md") else str(inside)


def python_page() -> str:
    """Return the page of all public names, in the sections and the order of the page by topic."""
    known, by_topic = places(), (GUIDE / BY_TOPIC).read_text(encoding="utf-8")
    explained = {entry[2] for entry in ENTRY.finditer(by_topic)}
    lines = [
        "# The Python API in full",
        "",
        "Every public name of `prunekit`, imported as `pk`, with its arguments, errors, and an example that",
        "the tests run. [By topic](api.md) it is shorter.",
    ]
    for section in re.split(r"^## ", by_topic, flags=re.MULTILINE):
        listed: list[str] = []
        for line in re.findall(r"^- `pk\..*", section, re.MULTILINE):
            first, *others = re.findall(r"`pk\.(\w+)", line)
            listed += [first, *(other for other in others if other not in explained)]
        if listed:
            lines += ["", f"## {section.splitlines()[0]}"]
        for name in dict.fromkeys(listed):
            lines += ["", f"::: {known[name]}", OPTIONS.format(heading=f'"pk.{name}"', name=f'"{name}"')]
    return "\n".join(lines) + "\n"


def notebook_page(path: Path) -> str:
    """Return a notebook as Markdown; its file is beside it in the site."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(f"```python\n{text}\n```" if cell["cell_type"] == "code" else text.replace(".ipynb)", ".md)"))
    parts.insert(1, f"[Download the notebook]({path.name}), or read [how to open it](index.md).")
    return "\n\n".join(parts) + "\n"


def places() -> dict[str, str]:
    """Return where each public name is defined."""
    stub = ast.parse((ROOT / "prunekit" / "__init__.pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: f"{node.module}.{alias.name}" for node in imports for alias in node.names}


def commands_page() -> str:
    """Return the page of all commands, with the help that each prints."""
    import click

    from prunekit.cli import cli

    lines = [
        "# Commands",
        "",
        "What each command prints with `--help`. Every key of a recipe can be set at the end of a command line,",
        "`prune.budget.macs=0.4`.",
    ]
    top = click.Context(
        cli, info_name="prunekit", terminal_width=80, max_content_width=80, help_option_names=["-h", "--help"]
    )

    def add(command: click.Command, context: click.Context, name: str) -> None:
        if isinstance(command, click.Group):
            for each in command.list_commands(context):
                inner = command.get_command(context, each)
                assert inner is not None
                add(inner, click.Context(inner, info_name=each, parent=context), f"{name} {each}")
        else:
            lines.extend(["", f"## {name}", "", "```text", command.get_help(context), "```"])

    add(cli, top, "prunekit")
    return "\n".join(lines) + "\n"
