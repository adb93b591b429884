"""`prunekit visualize cam` and `saliency`: where models see a class in an image."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from prunekit.cli.models import ModelOptions, model_command
from prunekit.cli.output import Console, save, table
from prunekit.cli.sides import find_sides, image_options, pictures_folder, report_of

if TYPE_CHECKING:
    from prunekit.visualize.overlay import Panel
    from prunekit.visualize.saliency_maps import SaliencyMethod
    from prunekit.workflow.seen import Find, Seen
    from prunekit.workflow.sides import Sides

FOLDER = "maps"
CAMS = {
    "grad_cam": "Grad-CAM",
    "grad_cam_pp": "Grad-CAM++",
    "layer_cam": "Layer-CAM",
    "eigen_cam": "Eigen-CAM",
    "cam": "CAM",
}
GRADIENTS = {"gradient": "Gradient", "smooth_grad": "SmoothGrad"}


def _shared_options(methods: dict[str, str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        default = next(iter(methods))
        for option in (
            model_command("the picture, and its figures as JSON.  [default: maps, for a run in its folder]"),
            click.option(
                "--class", "target", type=click.IntRange(min=0), metavar="N", help="[default: what the model predicts]"
            ),
            click.option("--method", type=click.Choice(list(methods)), default=default, show_default=True),
            image_options,
            click.argument("arguments", nargs=-1, metavar="MODEL [KEY=VALUE]..."),
        ):
            function = option(function)
        return function

    return decorate


@click.command("cam", short_help="Show where in an image a layer sees a class.")
@_shared_options(CAMS)
@click.option("--layer", metavar="PATH", help="Module whose output is an image.  [default: the last one]")
def cam_command(console: Console, given: ModelOptions, method: str, layer: str | None, **options: Any) -> None:
    """A class activation map over an image: where a model sees a class.

    MODEL is a run's folder or a model folder, whose dense model is shown beside the pruned one with the correlation of
    the two maps, so that one sees whether pruning moved what the model looks at; or a recipe or the name of a model.
    Class and layer are the dense model's where none is given. For models of tokens these go back to their places.
    Pictures of a run are in its report too.
    """

    def find() -> Find:
        from prunekit.visualize import class_activation_map

        return lambda model, image, where, target: class_activation_map(
            model,
            image,
            where,
            method=method,  # type: ignore[arg-type]  # click has checked it
            target=target,
        )

    _show(console, given, find, layer, **options)


@click.command("saliency", short_help="Show which pixels of an image a class depends on.")
@_shared_options(GRADIENTS)
@click.option("--samples", default=25, show_default=True, type=click.IntRange(min=1), help="Noisy copies of the image.")
@click.option(
    "--noise", default=0.15, show_default=True, type=click.FloatRange(min=0), help="Deviation, as a share of its range."
)
def saliency_command(
    console: Console, given: ModelOptions, method: SaliencyMethod, samples: int, noise: float, **options: Any
) -> None:
    """The gradient of a class's score with respect to every pixel; smooth_grad averages it over noisy copies.

    MODEL is as for `visualize cam`. Needs no layer, and works for every model of images. Pictures of a run are in its
    report too.
    """

    def find() -> Find:
        from prunekit.visualize import Smoothing, saliency

        how = Smoothing(samples, noise, given.seed or 0)
        return lambda model, image, where, target: saliency(model, image, method=method, target=target, smoothing=how)

    _show(console, given, find, None, **options)


def _show(
    console: Console,
    given: ModelOptions,
    find: Callable[[], Find],
    layer: str | None,
    *,
    arguments: tuple[str, ...],
    image: Path | None,
    index: int,
    target: int | None,
    device: str | None,
    output: Path | None,
) -> None:
    from prunekit.context import resolve_device
    from prunekit.visualize.overlay import write_picture
    from prunekit.workflow.seen import seen

    where = resolve_device(device or "auto")
    with console.running():
        sides = find_sides(arguments, given, console)
        folder = pictures_folder(sides, output, FOLDER)
        values, shown = sides.input(image, index)
        found = seen(sides, values, find(), layer=layer, target=target, device=where)
        title = _title(found)
        scale = "share of each map's largest value" if found.first.layer else "share of each map's 99.5th percentile"
        path = write_picture(folder / _name(found, shown), list(_panels(sides, values, shown, found)), title, scale)
    payload = {"model": sides.name, "image": shown, "title": title, **found.figures(), "picture": str(path)}
    save(payload, folder, path.with_suffix(".json").name, console)
    rows = [(side, f"{100 * row['probability']:.1f} %", row["predicted"]) for side, row in payload["models"].items()]
    pages = report_of(sides, folder, FOLDER)
    lines = [title, table(("model", "probability", "predicts"), rows), f"Picture: {path}"]
    console.result(payload, "\n".join([*lines, *(f"Report: {page}" for page in pages)]))


def _name(found: Seen, shown: str) -> str:
    """Of the picture's file: another one for each method, layer, image and class."""
    parts = [found.first.method, found.first.layer, Path(shown).stem, f"for-class-{int(found.first.classes[0])}"]
    return re.sub(r"[^\w.-]+", "-", "-".join(part for part in parts if part)).strip("-") + ".png"


def _title(found: Seen) -> str:
    first = found.first
    height, width = first.values.shape[1:]
    place = f" at {first.layer} ({height} x {width})" if first.layer else ""
    title = f"{(CAMS | GRADIENTS)[first.method]}{place}, class {int(first.classes[0])}"
    if len(found.maps) < 2:
        return title
    return f"{title}: " + (
        "one map is the same everywhere, so that there is no correlation"
        if found.correlation is None
        else f"correlation of dense and pruned {found.correlation:.2f}"
    )


def _panels(sides: Sides, values: Any, shown: str, found: Seen) -> list[Panel]:
    from prunekit.visualize.overlay import Panel, enlarged, heated, overlaid

    pixels = sides.preprocessing.shown(values[0])
    panels = [Panel(shown, enlarged(pixels))]
    for side, one in found.maps.items():
        drawn = overlaid(pixels, one.values[0]) if one.layer else heated(one.values[0])
        predicted, wanted = int(one.predicted[0]), int(one.classes[0])
        note = f"class {wanted}: {100 * float(one.probabilities[0]):.1f} %"
        panels.append(Panel(side, drawn, note if predicted == wanted else f"{note}; it predicts class {predicted}"))
    return panels
