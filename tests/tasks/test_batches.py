"""Whatever stands for data, as batches of what a model is called with."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import prunekit
from prunekit.errors import DataError, UsageError
from prunekit.measure.accuracy import evaluate
from prunekit.measure.group_sensitivity import measure_sensitivity
from prunekit.settings.calibration import RepairSettings
from prunekit.tasks.batches import ModelBatches, joined_inputs
from prunekit.tasks.classification import IMAGE_CLASSIFICATION
from prunekit.tasks.task import TASKS, get_task
from prunekit.utils.inputs import arguments_by_name

CPU = torch.device("cpu")


class Sensor(nn.Module):
    """Two signals (B, 3, 8), of which the second may be missing, to three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.head = nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, left: Tensor, right: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        assert labels is None
        both = left if right is None else left + 2 * right
        scores: Tensor = self.head(F.relu(self.norm(self.stem(both))).mean(2))
        return scores


class Rows:
    """Samples by name, in the protocol of map-style data sets, with an entry that no model takes."""

    def __init__(self, **columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns["left"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"name": "x" * index} | {name: column[index] for name, column in self.columns.items()}

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [self[index] for index in indices]


class Ratings(nn.Module):
    """Users and items, one number each, to a rating."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item, self.head = nn.Embedding(9, 8), nn.Embedding(7, 8), nn.Linear(16, 12)
        self.out = nn.Linear(12, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        both = torch.cat([self.user(user), self.item(item)], 1)
        return self.out(F.relu(self.head(both)))  # type: ignore[no-any-return]


def net() -> Sensor:
    torch.manual_seed(0)
    return Sensor().eval()


torch.manual_seed(1)
LEFT, RIGHT, LABELS = torch.randn(24, 3, 8), torch.randn(24, 3, 8), torch.arange(24) % 3
FORMS: dict[str, tuple[bool, Any]] = {
    "all samples": (False, LEFT),
    "tensors": (False, list(LEFT.split(8))),
    "two tensors of two": (False, [LEFT[:2], LEFT[2:]]),
    "loader of lists of one": (False, DataLoader(TensorDataset(LEFT), 8)),
    "data set": (False, TensorDataset(LEFT, LABELS)),
    "pairs": (False, DataLoader(TensorDataset(LEFT, LABELS), 8)),
    "tuples": (True, [((LEFT[:8], RIGHT[:8]), LABELS[:8]), ((LEFT[8:], RIGHT[8:]), LABELS[8:])]),
    "named and labels": (True, [({"right": RIGHT, "left": LEFT}, LABELS)]),
    "names": (True, DataLoader(Rows(left=LEFT, right=RIGHT, label=LABELS), 8)),  # type: ignore[arg-type]
    "all named": (True, UserDict(left=LEFT, right=RIGHT, labels=LABELS)),
    "named data set": (True, Rows(left=LEFT, right=RIGHT, label=LABELS)),
}


def through(model: nn.Module, data: Any, task: Any = None) -> Iterator[tuple[str, Any]]:
    """What every function makes of data that needs no targets."""
    pairs = iter(prunekit.calibrate(model, data, task=task).values())
    yield "calibrate", [layer.mean.copy() for layer in pairs]
    fresh = net()
    prunekit.recalibrate_batchnorm(fresh, data, task=task)
    yield "recalibrate", [fresh.norm.running_mean, fresh.norm.running_var]
    if not isinstance(data, Iterator):
        yield (
            "thresholds",
            prunekit.calibrate_thresholds(model, data, ["stem"], target=0.3, task=task)["stem"],
        )
    found = prunekit.sensitivity(model, data, task=task, measured_on=data)
    yield "sensitivity", [point.error for points in found.measured.values() for point in points]
    settings = RepairSettings(joint_steps=0)
    yield "prune", prunekit.prune(model, calibration=data, channels=0.6, task=task, repair=settings).scores.copy()


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_every_function_takes_every_form_of_data(name: str) -> None:
    second, data = FORMS[name]
    model = net()
    given = (LEFT, RIGHT) if second else (LEFT,)
    wanted = dict(through(model, [(given,)]))
    for which, found in through(model, data):
        same = [torch.as_tensor(one) for one in (found if isinstance(found, list) else [found])]
        other = [
            torch.as_tensor(one) for one in (wanted[which] if isinstance(wanted[which], list) else [wanted[which]])
        ]
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(same, other, strict=True)), which


@pytest.mark.parametrize("name", ["pairs", "tuples", "names", "all named", "data set"])
def test_functions_that_need_targets_find_them(name: str) -> None:
    second, data = FORMS[name]
    model = net()
    pair = ((LEFT, RIGHT), LABELS) if second else (LEFT, LABELS)
    want, got = (prunekit.collect_gradients(model, each, F.cross_entropy).terms for each in ([pair], data))
    for axis, terms in want.items():  # of batches of other sizes the mean is not the same
        assert got[axis].shape[1:] == terms.shape[1:]
    assert evaluate(model, data, "image_classification", CPU) == evaluate(model, [pair], IMAGE_CLASSIFICATION, CPU)


def unpack(batch: Any) -> tuple[Any, Any]:
    return batch["signal"], batch["class"]


def test_a_task_takes_batches_apart_everywhere() -> None:
    model = net()
    task = replace(IMAGE_CLASSIFICATION, name="signals", unpack=unpack)
    data = [{"signal": LEFT[:12], "class": LABELS[:12]}, {"signal": LEFT[12:], "class": LABELS[12:]}]
    assert dict(through(model, data, task)).keys() == dict(through(model, LEFT)).keys()
    terms = prunekit.collect_gradients(model, data, task=task).terms
    plain = prunekit.collect_gradients(model, [unpack(batch) for batch in data], F.cross_entropy).terms
    assert all((terms[axis] == plain[axis]).all() for axis in plain)
    for call in (prunekit.calibrate, prunekit.recalibrate_batchnorm):
        with pytest.raises(DataError, match=r"batch 1: expected tensors by the names .* got dict {signal.*task=\.\.\."):
            call(model, data)


def wrong(call: Callable[..., Any], data: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        call(net(), data)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (None, "a data set, or batches, such as a DataLoader; got NoneType"),
        ("images", "a data set, or batches, such as a DataLoader; got str"),
        ([LEFT, "path.png"], "batch 2: expected batches of tensors, .* got str"),
        ([LEFT.numpy()], "batch 1: expected batches of tensors, .* got ndarray"),
        (
            [{"left": LEFT.tolist()}],
            "batch 1: expected tensors by the names .* got dict {left: nested list}.*left holds no tensor",
        ),
        ({"left": LEFT, "right": RIGHT[:3]}, "a mapping of tensors with as many samples each"),
        (Rows(left=LEFT.tolist()), "a list in 'left'; a datasets.Dataset gives tensors after"),  # type: ignore[arg-type]
        (Rows(left=[LEFT[0], LEFT[1, :, :4]]), "samples of the same shapes, .*DataCollator"),  # type: ignore[arg-type]
    ],
)
def test_forms_that_are_none_are_refused_alike(data: Any, says: str) -> None:
    wrong(lambda model, data: prunekit.calibrate(model, data), data, says)
    wrong(lambda model, data: prunekit.recalibrate_batchnorm(model, data), data, says)
    wrong(lambda model, data: prunekit.calibrate_thresholds(model, data, ["stem"], target=0.3), data, says)
    wrong(lambda model, data: prunekit.collect_gradients(model, data, F.cross_entropy), _labeled(data), says)
    wrong(lambda model, data: prunekit.sensitivity(model, data), data, says)
    if data is not None:  # which is none
        wrong(lambda model, data: prunekit.prune(model, calibration=data, macs=0.5), data, says)
    wrong(lambda model, data: evaluate(model, data, IMAGE_CLASSIFICATION, CPU), _labeled(data), says)
    chart = prunekit.trace(net(), (LEFT[:2],))
    wrong(lambda model, data: measure_sensitivity(model, chart, {}, data), data, says)


class Patched(nn.Module):
    """Reads patches (N * 8, 3) of all signals on one axis, and which signal (N,) each text is about."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(3, 8), nn.Linear(8, 3)

    def forward(self, kind: Tensor, patches: Tensor) -> Tensor:
        scores: Tensor = self.head(F.relu(self.stem(patches)).view(len(kind), -1, 8).mean(1) + kind[:, None])
        return scores


class Flattening(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Patched()

    def forward(self, kind: Tensor, patches: Tensor) -> Tensor:
        scores: Tensor = self.inner(kind, patches.flatten(0, 1))
        return scores


def test_patches_of_all_samples_on_one_axis_are_refused_with_a_way_that_works() -> None:
    whole = {"kind": torch.arange(24).float(), "patches": LEFT.mT.flatten(0, 1)}
    parts = [{"kind": whole["kind"][i : i + 1], "patches": whole["patches"][8 * i : 8 * i + 8]} for i in range(24)]
    for data in (whole, parts):
        with pytest.raises(DataError, match=r"patches: float32 \(192, 3\).*a module around the model"):
            prunekit.prune(Patched(), calibration=data, channels=0.5)
    result = prunekit.prune(Flattening(), calibration=whole | {"patches": LEFT.mT}, channels=0.5)
    assert result.model.get_submodule("inner")(whole["kind"], whole["patches"]).shape == (24, 3)


def test_columns_of_numbers_collated_as_lists_name_the_format() -> None:
    """What a loader makes of a data set of plain lists: one tensor for each position."""
    batches = [{"left": list(LEFT[:8].unbind(2))}, {"left": list(LEFT[8:].unbind(2))}]
    with pytest.raises(DataError, match=r'got list; a datasets.Dataset gives tensors after .with_format\("torch"\)'):
        prunekit.prune(net(), calibration=batches, macs=0.5)


def _labeled(data: Any) -> Any:
    return [(LEFT, LABELS), *data[1:]] if isinstance(data, list) and data[0] is LEFT else data


def test_a_data_set_is_sampled_from_its_first_to_its_last_entry() -> None:
    (inputs, targets), *rest = ModelBatches(net(), TensorDataset(LEFT, LABELS), count=4)
    assert torch.equal(inputs[0], LEFT[[0, 8, 15, 23]])
    assert torch.equal(targets, LABELS[[0, 8, 15, 23]])
    assert not rest


def test_a_required_argument_called_labels_is_an_input() -> None:
    class Guided(nn.Module):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return x + labels[:, None, None]

    (((inputs,), targets),) = ModelBatches(Guided(), [{"labels": LABELS, "x": LEFT}])
    assert [list(inputs), inputs["labels"] is LABELS, targets is LABELS] == [["x", "labels"], True, True]


def test_tasks_are_known_by_name_and_for_a_wrong_name_the_nearest_is_named() -> None:
    assert [get_task(name).name for name in TASKS.names] == list(TASKS.names)
    assert get_task(IMAGE_CLASSIFICATION) is IMAGE_CLASSIFICATION
    message = "task: expected the name of a task, or .* got 'text_clasification'; did you mean 'text_classification'"
    for call in (
        lambda task: prunekit.prune(net(), calibration=LEFT, macs=0.5, task=task),
        lambda task: prunekit.calibrate(net(), LEFT, task=task),
        lambda task: prunekit.recalibrate_batchnorm(net(), LEFT, task=task),
        lambda task: prunekit.collect_gradients(net(), [(LEFT, LABELS)], task=task),
        lambda task: prunekit.sensitivity(net(), LEFT, task=task),
        lambda task: evaluate(net(), [(LEFT, LABELS)], task, CPU),
    ):
        with pytest.raises(UsageError, match=message):
            call("text_clasification")
    with pytest.raises(UsageError, match=r"task: expected one of .* got int"):
        get_task(3)  # type: ignore[arg-type]


class Reader(nn.Module):
    def forward(self, ids: Tensor, attention_mask: Tensor | None = None, kinds: Tensor | None = None) -> Tensor:
        return ids


def batch(lengths: list[int], *, left: bool = False, filler: int = 9, mask: bool = True) -> tuple[Any, ...]:
    """Token ids 1, 2, ... with a mask, and kinds."""
    ids, counted = torch.full((len(lengths), max(lengths)), filler), torch.zeros(len(lengths), max(lengths)).long()
    for row, length in enumerate(lengths):
        where = slice(-length, None) if left else slice(length)
        ids[row, where], counted[row, where] = torch.arange(1, length + 1), 1
    return (ids, counted, counted * 4) if mask else (ids,)


class Strict(nn.Module):
    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        return ids


class Optional(nn.Module):
    def forward(self, ids: Tensor, attention_mask: Tensor, kinds: Tensor | None = None) -> Tensor:
        return ids


def test_a_batch_of_all_that_forward_requires_holds_no_targets() -> None:
    ids, mask = batch([2, 4])[:2]
    for given in ((ids, mask), [ids, mask]):
        ((inputs, targets),) = ModelBatches(Strict(), [given])
        assert targets is None
        assert torch.equal(arguments_by_name(Strict(), inputs)["attention_mask"], mask)
    labels = torch.zeros(2)
    for given in ((ids, mask, labels), [ids, mask, labels], (ids, mask, labels, torch.ones(2))):  # and of more does
        ((inputs, targets),) = ModelBatches(Strict(), [given])
        assert [*inputs] == [ids, mask]
        assert targets is labels
    with pytest.raises(DataError, match=r"2 inputs and targets, .* optional arguments of Optional; say how"):
        list(ModelBatches(Optional(), [(ids, mask, mask, labels)]))
    with pytest.raises(DataError):  # targets that are no tensor are not cut into batches
        list(ModelBatches(Strict(), (ids, mask, [0, 1])))
    ((inputs, targets),) = ModelBatches(Reader(), [(ids, mask)])  # requires one: the second holds targets, as ever
    assert len(inputs) == 1
    assert targets is mask


@pytest.mark.parametrize("left", [False, True])
def test_batches_of_several_lengths_are_padded_as_they_are_themselves(left: bool) -> None:
    ids, mask, kinds = joined_inputs(Reader(), [batch([2, 3], left=left), batch([5], left=left)])
    wanted = batch([2, 3, 5], left=left)
    assert torch.equal(ids, wanted[0])
    assert torch.equal(mask, wanted[1])
    assert torch.equal(kinds, wanted[2])


def test_batches_without_a_mask_beside_others_count_as_a_whole() -> None:
    ids, mask = joined_inputs(Reader(), [batch([4, 2])[:2], batch([4], mask=False), batch([3], mask=False)])
    assert mask.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0]]
    assert ids[3].tolist() == [1, 2, 3, 9]
    alike = joined_inputs(Reader(), [batch([4, 4])[:2], batch([4], mask=False)])
    assert alike[1].tolist() == [[1] * 4] * 3


def test_a_mask_left_out_in_between_is_one_of_ones() -> None:
    inputs = joined_inputs(Reader(), [(torch.ones(2, 3).long(), None, torch.zeros(2, 3).long())])
    assert inputs[1].tolist() == [[1] * 3] * 2


def test_what_cannot_be_joined_is_named() -> None:
    class Plain(nn.Module):
        def forward(self, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
            return ids

    with pytest.raises(DataError, match=r"samples of one size, got batches of \(3,\) and \(5,\); .* attention_mask"):
        joined_inputs(Plain(), [batch([3], mask=False), batch([5], mask=False)])
    with pytest.raises(DataError, match="batch 2: expected the same inputs as in the first one"):
        joined_inputs(Plain(), [(LEFT[0], LABELS), (LEFT[0],)])


def test_a_tuple_of_all_required_inputs_holds_all_samples() -> None:
    torch.manual_seed(0)
    model, inputs = Ratings(), (torch.randint(9, (200,)), torch.randint(7, (200,)))
    batches = ModelBatches(model, inputs, size=64)
    assert [len(user) for (user, _), _ in batches] == [64, 64, 64, 8]
    assert torch.equal(joined_inputs(model, [given for given, _ in batches])[1], inputs[1])
    found = prunekit.prune(model, calibration=inputs, params=0.6)
    assert found.max_relative_difference < 1e-9
    assert [len(rated) for _, rated in ModelBatches(model, (*inputs, torch.rand(200)), size=64)] == [64, 64, 64, 8]
    alone = [given for given, _ in ModelBatches(net(), (torch.randn(4, 3, 8), torch.randn(4, 3, 8)))]
    assert [len(given) for given in alone] == [1, 1]  # two batches of a model that requires one input


def test_numbers_without_a_second_axis_are_one_sample_where_they_are_alone() -> None:
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    with pytest.raises(DataError, match="at least 8 samples"):
        prunekit.prune(model, calibration=torch.randint(9, (32,)), macs=0.6)
