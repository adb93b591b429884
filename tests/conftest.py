"""Processes and threads of the suite.

One thread for every test: two OpenMP threads beside a busy process are many times slower than one. What a test starts
inherits that. Whole files are shared out among processes: a fixture that is a job takes minutes, and tests of one file
in two processes make it twice.
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Iterator
from tempfile import TemporaryDirectory

import hypothesis
import psutil
import pytest
from efforts import DRAWN, HERE, LITTLE

from prunekit.measure.latency.machine import cores, cpu_quota
from prunekit.measure.measurement_effort import effort_of

MOST = 4
MEMORY = 3 << 30
"""Bytes that a process of the suite takes in the end, about."""
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TRIM_THRESHOLD_": str(4 << 30)}
"""glibc keeps freed memory: each step of a training would have its gradients' pages from the kernel again."""
CACHE: list[TemporaryDirectory[str]] = []
"""The folder of the session's `PRUNEKIT_CACHE`; a test that must train by itself sets another."""

hypothesis.settings.register_profile("untimed", deadline=None)
"""A machine may be slow, or do other work: no property is about time."""


def pytest_configure(config: pytest.Config) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    if not hasattr(config, "workerinput"):  # one cache for all processes: what a job trained, others begin with
        CACHE.append(TemporaryDirectory(prefix="prunekit-tests-"))
        os.environ["PRUNEKIT_CACHE"] = CACHE[0].name
    os.environ |= ALLOCATOR
    hypothesis.settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first: in the end no process should wait long for another's last file."""
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """What was imported stays, and no garbage collection need look through it."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()
    while CACHE:
        CACHE.pop().cleanup()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """None for single files, which are done before a second process has imported torch."""
    if all(".py" in argument for argument in config.args):
        return 0
    return max(1, min(MOST, cores(), math.ceil(cpu_quota() or MOST), psutil.virtual_memory().available // MEMORY))


@pytest.fixture(autouse=True, scope="module")
def _looked_through_once() -> Iterator[None]:
    """What a module of tests leaves stays as well: in the end that is millions of objects, seconds to look through."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _one_thread_and_no_mode_left_on() -> Iterator[None]:
    """A mode that stays on would fail all tests that come later in this process, far from its cause."""
    import torch  # not above: the process that only hands out the tests never needs it, and takes seconds to import it

    torch.set_num_threads(1)
    yield
    in_mode = torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.Python)
    assert (torch.is_inference_mode_enabled(), torch.is_grad_enabled(), in_mode) == (False, True, False)


@pytest.fixture(autouse=True, scope="session")
def _no_waiting_for_the_disk() -> Iterator[None]:
    """No test pulls the plug: what is written is there without waiting until it is on the disk."""
    from prunekit.utils import files

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "sync", lambda path: None)
        yield


@pytest.fixture
def little_effort() -> Iterator[None]:
    """Measures so little that figures of time mean nothing."""
    with effort_of(LITTLE):
        yield


@pytest.fixture
def here() -> Iterator[None]:
    """Measures in this process, whose objects the models of a test can reach."""
    with effort_of(HERE):
        yield


@pytest.fixture
def drawn() -> Iterator[None]:
    """Draws figures: for tests of what a page shows."""
    with effort_of(DRAWN):
        yield


@pytest.fixture(autouse=True)
def _own_registrations_go() -> Iterator[None]:
    """Remove after a test the names that it registered: other tests know those that come with the package.

    A name that a module of the package registers stays, also if the test is the first that imports the module.
    """
    from prunekit import known_names
    from prunekit.utils.registry import Registry

    package = os.path.join(os.path.dirname(known_names.__file__), "")
    each = [found for found in vars(known_names).values() if isinstance(found, Registry)]
    before = [set(one._items) for one in each]
    yield
    for one, names in zip(each, before, strict=True):
        for name in set(one._items) - names - set(one.declared):
            if not one._homes.get(name, ("", ""))[0].startswith(package):
                del one._items[name]
                one._homes.pop(name, None)
