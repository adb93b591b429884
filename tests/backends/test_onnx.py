"""ONNX files hold what the model computes."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn

from prunekit.backends.files.onnx_program import OPSET, export_onnx
from prunekit.errors import RunError


class Attending(nn.Module):
    """Attention, an operator of its own in this opset, and a dropout that only trains."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.drop = nn.Linear(8, 24), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        out: Tensor = self.drop(nn.functional.scaled_dot_product_attention(q, k, v))
        return out


@pytest.mark.slow
def test_a_model_in_train_mode_is_exported_in_eval_mode_and_left_alone(tmp_path: Path) -> None:
    import onnxruntime

    model, sample = Attending(), torch.randn(2, 1, 5, 8)
    file = export_onnx(model, sample, tmp_path / "model.onnx")
    assert model.training
    assert [(one.domain, one.version) for one in onnx.load(file).opset_import] == [("", OPSET)]
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: sample.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(found), model.eval()(sample))


class Branching(nn.Module):
    """Looks at values, which no graph can hold."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if float(x.sum()) > 0 else x.nonzero()


class Bessel(nn.Module):
    """Computes with an operator that ONNX lacks."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.special.bessel_j0(x)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "reason"), [(Branching(), "data-dependent"), (Bessel(), "bessel_j0")])
def test_what_cannot_be_exported_says_why(model: nn.Module, reason: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=rf"{type(model).__name__} cannot be exported to ONNX: .*{reason}"):
        export_onnx(model, torch.ones(1, 3), tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []
