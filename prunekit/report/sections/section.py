"""Sections of a run's page: the protocol that they follow, and their registry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from markupsafe import Markup, escape

from prunekit import known_names
from prunekit.errors import UsageError
from prunekit.measure.measurement_effort import current_effort, effort_of
from prunekit.report.rendering import rendered
from prunekit.report.run_data import Run
from prunekit.utils.registry import Registry

SECTIONS: Registry[Section] = known_names.SECTIONS


Kind = TypeVar("Kind", bound=Callable[..., Any])


@dataclass(frozen=True)
class Section:
    """A section of a run's page and of the terminal's text; see `register_section`.

    Those of prunekit itself may be a function of a run, the same as `read`, which returns the values of the template of
    the section's name; `lines` are those of them that the terminal says too, with what goes before each line.
    """

    name: str
    content: Any  # with `read`, and `html` and `text` where it has any; or a function of a run
    about: str = ""
    order: float = 500
    lines: Mapping[str, str] = field(default_factory=dict)

    def html(self, run: Run) -> Markup:
        """Return the section of a run as HTML; empty if the run has no such section."""
        data, html = self._read(run), getattr(self.content, "html", None)
        if data is None:
            return Markup()
        return rendered(f"sections/{self.name}.html", **data) if html is None else escape(html(data))

    def text(self, run: Run) -> list[str]:
        """Return the lines that the terminal says of a finished run."""
        say = getattr(self.content, "text", None)
        if say:
            return [] if (data := self._read(run)) is None else list(say(data))
        if not self.lines:
            return []
        with effort_of(replace(current_effort(), figures=False)):  # drawing takes longer than all else
            data = self._read(run)
        return [] if data is None else [f"{name} {one}" for key, name in self.lines.items() for one in data[key]]

    def _read(self, run: Run) -> Any:
        return getattr(self.content, "read", self.content)(run)


def register_section(
    name: str, *, about: str, order: float = 500, lines: Mapping[str, str] | None = None
) -> Callable[[Kind], Kind]:
    """Register a section of the pages of runs, which `finetune`, `prune` and `report` write.

    What it decorates is a class that is made without arguments, and has

    - `read(run)`, which gets the files of a run (`run.folder`, `run.metrics`, tables such as `run.layers`) and returns
      the content of the section, or None;
    - `html(data)`, which returns the content as HTML: a `markupsafe.Markup` is not changed, other text is escaped;
    - `text(data)`, optional, which returns lines for the terminal.

    If a user's section raises, the page names it in its place, and has the rest.

    Args:
        name: name of the section in messages.
        about: one line on its content.
        order: its place on the page: prunekit's own sections are at 5 (what to do now), and at multiples of 10 from 10
            (the result) to 170 (locked channels); environment and recipe come last.
        lines: of prunekit's own sections, see `Section`.

    Returns:
        A decorator that returns the class as it is.

    Raises:
        ValueError: the name is taken.

    Example:
        >>> import prunekit as pk
        >>> from markupsafe import Markup
        >>> @pk.register_section("energy", about="what a forward pass takes in joules", order=25)
        ... class Energy:
        ...     def read(self, run):
        ...         return run.metrics.get("energy")
        ...     def html(self, joules):
        ...         return Markup("<section><h2>Energy</h2><p>{} J</p></section>").format(joules)
        ...     def text(self, joules):
        ...         return [f"Energy: {joules} J"]
    """

    def register(kind: Kind) -> Kind:
        content = kind() if isinstance(kind, type) else kind
        SECTIONS.add(name, Section(name, content, about, order, lines or {}), kind)
        return kind

    return register


def accept(reference: str, found: Any) -> Section:
    """Return the section that `file.py:object` names: a class that it registers, or one with `read` and `html`."""
    if isinstance(found, Section):
        return found
    registered = next((each for each in SECTIONS.imported if type(each.content) is found), None)
    if registered is not None:
        return registered
    content = found() if isinstance(found, type) else found
    if not all(callable(getattr(content, name, None)) for name in ("read", "html")):
        raise UsageError(
            f"section {reference}: expected a class with the methods read(run) and html(data), got "
            f"{getattr(found, '__name__', type(found).__name__)}"
        )
    return Section(reference, content)


def ordered(named: Iterable[str] = ()) -> Sequence[Section]:
    """Return all known sections and those that are named, in the order of the page."""
    found = {id(one): one for one in map(SECTIONS.get, [*SECTIONS.names, *named])}
    return sorted(found.values(), key=lambda one: one.order)
