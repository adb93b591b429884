"""Compact models whose classes have explicit sizes go through pickle as any other: to files, copies and processes."""

from __future__ import annotations

import abc
import copy
import io
import multiprocessing
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from equivalence import TOLERANCE, parity, random_keep, randomized, settled_plan
from nets_stated import CLASSES as STATED
from nets_stated import WIDTH, Quotient
from torch import nn

from prunekit.channels.rewrite.source_rewriter import original_of, sized_class
from prunekit.channels.trace import trace
from prunekit.channels.trial.trial import run_trial
from prunekit.compaction.compact_model import compact, remarks
from prunekit.errors import ArtifactError
from prunekit.hooks.hook import HookWarning
from prunekit.masks.masked_model import masked
from prunekit.planning.plan import Plan
from prunekit.pruning.prune import prune

EXAMPLE = (torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(3)),)


class Outer:
    class Nested(Quotient):
        """A class that is found by the name of another."""


class Abstract(Quotient, abc.ABC):
    """A class with a metaclass."""


class Stateful(Quotient):
    """A class with its own idea of its state."""

    def __getstate__(self) -> dict[str, Any]:
        return {"kept": {**vars(self)}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state["kept"])
        self.restored = True


class Reduced(Quotient):
    """A class that is made anew by its constructor, and takes its tensors over."""

    def __reduce__(self) -> Any:
        return Reduced, (self.num_heads,), {"_modules": self._modules, "training": self.training}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


CLASSES = [Quotient, Outer.Nested, Abstract, Stateful, Reduced]


def narrow(cls: type[nn.Module]) -> Any:
    net = randomized(nn.Sequential(nn.Linear(6, WIDTH), cls(), nn.Linear(WIDTH, 4))).eval()
    plan = next(
        plan for seed in range(20) if (plan := settled_plan(net, EXAMPLE, seed, 0.4)).kept("0.weight", 0).size % 3
    )
    small: Any = compact(net, plan)
    assert type(small[1]) is not cls
    assert original_of(type(small[1])) is cls
    return small


def saved_and_loaded(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded: nn.Module = torch.load(buffer, weights_only=False)
    return loaded


@pytest.mark.parametrize("cls", CLASSES)
def test_whatever_way_it_comes_back_it_is_the_same_model_of_the_same_class(cls: type[nn.Module]) -> None:
    small = narrow(cls)
    ways = [pickle.loads(pickle.dumps(small, protocol)) for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)]
    ways += [copy.deepcopy(small), copy.copy(small), saved_and_loaded(small)]
    with torch.no_grad():
        want = small(*EXAMPLE)
        for again in ways:
            assert type(again[1]) is type(small[1])
            assert torch.equal(again(*EXAMPLE), want)


def test_picklers_that_write_classes_down_compute_the_same() -> None:
    dill = pytest.importorskip("dill")
    small = narrow(Outer.Nested)
    with torch.no_grad():
        assert torch.equal(dill.loads(dill.dumps(small))(*EXAMPLE), small(*EXAMPLE))


def test_the_class_itself_and_modules_in_the_attributes_of_others() -> None:
    small = narrow(Outer.Nested)
    cls = type(small[1])
    assert pickle.loads(pickle.dumps(cls)) is cls
    assert copy.deepcopy(cls) is cls
    holder, parts = pickle.loads(pickle.dumps((cls, [small[1], {"again": small[1]}])))
    assert type(parts[0]) is holder
    assert parts[0] is parts[1]["again"]


def test_a_subclass_of_a_compiled_class_is_found_by_its_own_name() -> None:
    assert pickle.loads(pickle.dumps(Derived)) is Derived
    assert isinstance(pickle.loads(pickle.dumps(Derived())), Derived)


Derived: Any = type("Derived", (sized_class(Quotient, []),), {"__module__": __name__})


@pytest.mark.slow
def test_a_process_of_its_own_computes_the_same() -> None:
    small = narrow(Quotient)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        got = pool.apply(computed, (pickle.dumps(small), EXAMPLE[0].tolist()))
    with torch.no_grad():
        assert torch.allclose(torch.tensor(got), small(*EXAMPLE), atol=1e-6)


def computed(pickled: bytes, rows: list[Any]) -> list[Any]:
    with torch.no_grad():
        found: list[Any] = pickle.loads(pickled)(torch.tensor(rows)).tolist()
    return found


def test_python_that_is_not_what_it_was_is_named() -> None:
    cls = type(narrow(Quotient)[1])
    names = sorted(map(str, cls._prunekit_places))
    moved = [names[0].replace(": ", ": 1 + ")]
    with pytest.raises(ArtifactError, match=r"nets_stated\.Quotient: expected the Python that this model was pruned"):
        sized_class(Quotient, moved)


def test_substituted_attention_goes_through_pickle() -> None:
    attention = nn.TransformerEncoderLayer(12, 3, 16, batch_first=True)
    net = randomized(nn.Sequential(nn.Linear(6, 12), attention, nn.Linear(12, 4))).eval()
    small: Any = compact(net, settled_plan(net, EXAMPLE, share=0.5))
    assert type(small[1].self_attn) is not nn.MultiheadAttention
    again: Any = saved_and_loaded(small)
    assert type(again[1].self_attn) is type(small[1].self_attn)
    with torch.no_grad():
        assert torch.equal(again(*EXAMPLE), small(*EXAMPLE))


@pytest.mark.parametrize("cls", [*STATED, nn.MultiheadAttention])
def test_plain_classes_prune_what_needs_no_other_class(cls: Any) -> None:
    inner = nn.TransformerEncoderLayer(WIDTH, 3, 16, batch_first=True) if cls is nn.MultiheadAttention else cls()
    net = randomized(nn.Sequential(nn.Linear(6, 9), nn.Linear(9, WIDTH), inner, nn.Linear(WIDTH, 4))).eval()
    chart = trace(net, EXAMPLE)
    free = run_trial(net, chart, partial(random_keep, seed=1, share=0.5), [EXAMPLE])
    for start in (chart, free.channel_map):  # also where a trial has settled on other classes already
        settled = run_trial(net, start, partial(random_keep, seed=1, share=0.5), [EXAMPLE], plain=True)
        plan = Plan(settled.channel_map, settled.keep)
        small = compact(net, plan)
        assert [type(module) for module in small.modules()] == [type(module) for module in net.modules()]
        assert parity(net, plan, EXAMPLE) <= TOLERANCE
        assert small[0].out_features < 9  # type: ignore[index]
        reasons = [lock.reason for lock in settled.channel_map.locks]
        changed = any(type(a) is not type(b) for a, b in zip(free.compact.modules(), net.modules(), strict=True))
        assert changed or not any("plain_classes" in reason for reason in reasons)


def test_notes_name_classes_that_are_not_the_models_own() -> None:
    assert remarks(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == ()
    (said,) = remarks(narrow(Quotient))
    assert said.startswith("methods compiled again with explicit sizes: Quotient. Pickled, as by torch.save(model)")
    attention = randomized(nn.TransformerEncoderLayer(6, 3, 16, batch_first=True)).eval()
    pruned = prune(attention, EXAMPLE, channels=0.6)
    assert any("explicit sizes in place of torch's or the model's own: SizedMul" in note for note in pruned.notes)
    (said,) = prune(attention, EXAMPLE, channels=0.6, plain_classes=True).notes  # only why more channels stay
    assert said.startswith("more channels stay than the trace locks: self_attn (): MultiheadAttention")


def test_notes_say_that_a_model_is_frozen_and_masks_that_nothing_is_trained() -> None:
    net = randomized(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4)))
    net[0].weight.requires_grad_(False)
    assert prune(net, EXAMPLE, channels=0.6).notes == ()
    net.requires_grad_(False)
    pruned = prune(net, EXAMPLE, channels=0.6)
    assert not any(parameter.requires_grad for parameter in pruned.model.parameters())
    assert pruned.notes[0].startswith("all 4 parameters are frozen (requires_grad=False), as in the model that was")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    warned = pytest.warns(HookWarning, match="every parameter of Sequential has requires_grad=False, so no step")
    with warned, masked(net, pruned.plan, optimizer):
        pass
