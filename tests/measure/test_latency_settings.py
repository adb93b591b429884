"""Which combinations of what is named are timed, and what is refused."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from prunekit.backends.backend import RUNTIMES, FunctionBackend
from prunekit.backends.session import Session
from prunekit.errors import UsageError
from prunekit.measure.latency.comparison import choose_settings
from prunekit.settings.deployment import LatencySettings
from prunekit.utils import availability

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_every_runtime_that_settings_name_is_there() -> None:
    assert {"compile", "cudagraphs", "eager", "onnxruntime", "openvino", "tensorrt"} <= set(RUNTIMES.names)
    assert all(runtime.name == name and runtime.about for name, runtime in RUNTIMES.items())


def test_why_a_runtime_is_unusable_here() -> None:
    assert RUNTIMES.get("eager").unusable() == ""
    if not torch.cuda.is_available():
        assert RUNTIMES.get("cudagraphs").unusable() == "runs on cuda, and there is none here"
    own = FunctionBackend("own", lambda *_: Session(lambda: None), packages=("prunekit", "not_here.at_all"))
    assert own.unusable() == "needs not_here.at_all, not installed here: pip install not_here.at_all"


def test_the_product_is_timed_as_far_as_it_goes_together() -> None:
    settings = LatencySettings(
        (1, 8), (1, 2), runtimes=("eager", "onnxruntime"), dtypes=("fp32", "bf16"),
        memory_formats=("contiguous", "channels_last"),
    )  # fmt: skip
    found, notes = choose_settings(settings, [CPU])
    eager = [setting for setting in found if setting.runtime == "eager"]
    assert len(eager) == len(set(eager)) == 2**4
    rest = [(setting.batch, setting.threads) for setting in found if setting.runtime == "onnxruntime"]
    assert rest == [(1, 1), (8, 1), (1, 2), (8, 2)]
    assert len(notes) == 3
    assert notes[0].startswith("onnxruntime on cpu, float32, channels_last: not timed: it chooses layouts itself")


def test_threads_are_of_the_cpu() -> None:
    found, _ = choose_settings(LatencySettings((1,), (1, 2)), [CPU, CUDA])
    assert [(setting.device, setting.threads) for setting in found] == [("cpu", 1), ("cpu", 2), ("cuda:0", 1)]


@pytest.mark.parametrize(
    ("named", "devices", "message"),
    [
        ({"runtimes": ("eager", "onnxruntime"), "dtypes": ("bf16",)}, [CPU], "onnxruntime on cpu, bfloat16"),
        ({"runtimes": ("onnxruntime",), "dtypes": ("fp32", "fp16")}, [CPU], "float16, contiguous: not timed"),
        ({"runtimes": ("onnxruntime",)}, [CPU, CUDA], "onnxruntime on cuda:0.*it runs on cpu here"),
        ({"runtimes": ("cudagraphs",)}, [CPU], "it runs on cuda here; nothing was measured"),
        ({"runtimes": ("openvino",), "memory_formats": ("channels_last",)}, [CPU], "chooses layouts itself"),
    ],
)
def test_what_is_named_and_timed_nowhere_is_refused(
    named: dict[str, tuple[str, ...]], devices: list[torch.device], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        choose_settings(LatencySettings((1,), **named), devices)  # type: ignore[arg-type]


def test_a_runtime_that_is_not_installed_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(name: str) -> object:
        return None if name in ("onnxruntime", "openvino", "tensorrt") else find_spec(name)

    monkeypatch.setattr(availability, "find_spec", without)
    for name, extra in (("onnxruntime", "export"), ("openvino", "openvino"), ("tensorrt", "tensorrt")):
        with pytest.raises(UsageError, match=rf"needs {name}, not installed here: pip install 'prunekit\[{extra}\]'"):
            choose_settings(LatencySettings((1,), runtimes=("eager", name)), [CPU])  # type: ignore[arg-type]
