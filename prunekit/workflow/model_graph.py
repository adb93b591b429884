"""A model as a graph for TensorBoard, drawn from the channel map: what ran, in its order, and what read what."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from prunekit.channels import ChannelMap
from prunekit.planning import Plan

if TYPE_CHECKING:
    from tensorboard.compat.proto.graph_pb2 import GraphDef

INPUT = "input"


def model_graph(chart: ChannelMap, plan: Plan) -> GraphDef:
    """The operators of the run that the channel map was made from, under the modules that they ran in.

    Nothing is run or traced for it. A node is `<module path>/<operator>`, with `/` for the dots, so that TensorBoard
    folds modules; edges are tensors, the shortcuts among them. Each node holds the shapes of its results, of the
    parameters of its module what the plan leaves (`64x3x7x7 -> 40x3x7x7`), and the module's multiply-accumulates before
    and after. Operators that read nothing but parameters, such as the transposition of a weight, are left out.

    Args:
        chart: that the model was traced for, not one from a file.
        plan: of the same model; may be from a file.

    Raises:
        ValueError: the map was read from a file.
    """
    from tensorboard.compat.proto.graph_pb2 import GraphDef
    from tensorboard.compat.proto.versions_pb2 import VersionDef

    macs = plan.channel_map.layer_macs(), plan.channel_map.layer_macs(plan.keep)
    graph = GraphDef(versions=VersionDef(producer=22))
    graph.node.add(name=INPUT, op="Placeholder")
    names = {-1: INPUT}
    taken: Counter[str] = Counter()
    for number, operator in enumerate(chart.traced.trace.runs[0].operators):
        sources = [names[source] for source in operator.reads if source in names]
        if not sources:
            continue
        kind = operator.name.removeprefix("aten.").strip("_")
        name = "/".join([*operator.module.split("."), kind]) if operator.module else kind
        taken[name] += 1
        names[number] = name if taken[name] == 1 else f"{name}_{taken[name] - 1}"
        node = graph.node.add(name=names[number], op=kind, input=sources)
        for shape in operator.call[2]:
            sizes = node.attr["_output_shapes"].list.shape.add()
            for size in shape:
                sizes.dim.add(size=size)
        for key, text in _facts(operator.module, plan, macs).items():
            node.attr[key].s = text.encode()
    return graph


def _facts(module: str, plan: Plan, macs: tuple[dict[str, int], dict[str, int]]) -> dict[str, str]:
    """What the plan does to a module's own parameters, and to its cost."""
    found = {}
    for name, shape in plan.channel_map.shapes.items():
        owner, _, own = name.rpartition(".")
        if owner == module:
            left = [len(plan.kept(name, axis)) for axis in range(len(shape))]
            found[own] = f"{_times(shape)} -> {_times(left)}"
    if module in macs[0]:
        found["macs"] = f"{macs[0][module]} -> {macs[1][module]}"
    return found


def _times(shape: Any) -> str:
    return "x".join(map(str, shape)) or "1"
