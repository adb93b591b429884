"""Compact models whose classes have explicit sizes go through pickle as any other: to files, copies and processes."""

from __future__ import annotations

import abc
import copy
import io
import multiprocessing
import pickle
from typing import Any

import pytest
import torch
from equivalence import randomised, settled_plan
from nets_stated import WIDTH, Quotient
from torch import nn

from prunekit.channels.rewriting import original_of, sized_class
from prunekit.compaction import compact
from prunekit.errors import ArtifactError

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
    net = randomised(nn.Sequential(nn.Linear(6, WIDTH), cls(), nn.Linear(WIDTH, 4))).eval()
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
    net = randomised(nn.Sequential(nn.Linear(6, 12), attention, nn.Linear(12, 4))).eval()
    small: Any = compact(net, settled_plan(net, EXAMPLE, share=0.5))
    assert type(small[1].self_attn) is not nn.MultiheadAttention
    again: Any = saved_and_loaded(small)
    assert type(again[1].self_attn) is type(small[1].self_attn)
    with torch.no_grad():
        assert torch.equal(again(*EXAMPLE), small(*EXAMPLE))
