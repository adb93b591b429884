"""Files run where only their runtime is: without torch, or without prunekit, fed as their metadata says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import real_cifar
import torch
from exporting import source_of, write
from PIL import Image
from torch import nn
from torchvision.models import VisionTransformer

import prunekit as pk
from prunekit.models.cifar import CifarResNet

IMAGES = 64
CLASSES = tuple(f"class {index}" for index in range(10))
FEEDING = '''
import builtins, json, sys
from importlib.abc import MetaPathFinder

class Nothing(MetaPathFinder):
    """Lets nobody import what is not in this process."""

    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"no {name} here")

sys.meta_path.insert(0, Nothing())

import numpy as np
from PIL import Image

def prepared(path, how):
    """The input of an image file, by the metadata alone."""
    image = Image.open(path).convert("RGB")
    width, height, short = how["width"], how["height"], how["shorter_side"]
    kind = {"nearest": Image.NEAREST, "bilinear": Image.BILINEAR, "bicubic": Image.BICUBIC}[how["interpolation"]]
    if image.size != (width, height) and short is not None:
        wide, high = image.size
        size = (short, int(short * high / wide)) if wide <= high else (int(short * wide / high), short)
        image = image.resize(size, kind)
        left, top = round((size[0] - width) / 2), round((size[1] - height) / 2)
        image = image.crop((left, top, left + width, top + height))
    pixels = np.asarray(image, np.float32) / how["white"]
    if how["channel_order"] == "bgr":
        pixels = pixels[..., ::-1]
    pixels = (pixels - np.array(how["mean"], np.float32)) / np.array(how["std"], np.float32)
    return pixels.transpose(2, 0, 1)

def classes(folder, how, names, run):
    """The class of each image of a folder, in two batches of other sizes."""
    import pathlib
    batch = np.stack([prepared(path, how) for path in sorted(pathlib.Path(folder).iterdir())])
    scores = np.concatenate([run(batch[:1]), run(batch[1:])])
    return [names[index] for index in scores.argmax(1)]
'''
ONNX = """
import onnxruntime
for file in sys.argv[2:]:
    session = onnxruntime.InferenceSession(file)
    known = session.get_modelmeta().custom_metadata_map
    name = session.get_inputs()[0].name
    print(json.dumps(classes(sys.argv[1], json.loads(known["preprocessing"]), json.loads(known["classes"]),
                             lambda batch: session.run(None, {name: batch})[0])))
"""
OPENVINO = """
import openvino
for file in sys.argv[2:]:
    core = openvino.Core()
    model = core.read_model(file)
    known = json.loads(model.get_rt_info("prunekit").value)
    compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    (name,) = (entry["name"] for entry in known["inputs"])
    print(json.dumps(classes(sys.argv[1], known["preprocessing"], known["classes"],
                             lambda batch: compiled({name: batch})[known["outputs"][0]["name"]])))
"""
TORCH = """
import torch
for file in sys.argv[2:]:
    extra = {"prunekit.json": ""}
    model = torch.export.load(file, extra_files=extra).module()
    known = json.loads(extra["prunekit.json"])
    print(json.dumps(classes(sys.argv[1], known["preprocessing"], known["classes"],
                             lambda batch: model(torch.from_numpy(batch)).detach().numpy())))
"""
DOORS = {
    "onnx": (ONNX, {"torch", "torchvision", "prunekit", "onnx"}),
    "openvino": (OPENVINO, {"torch", "torchvision", "prunekit", "onnx", "onnxruntime"}),
    "pt2": (TORCH, {"torchvision", "prunekit", "timm", "transformers"}),
}
PREPARED = pk.Preprocessing(height=32, width=32, shorter_side=36, interpolation="bicubic")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Image files of several sizes: of CIFAR-10 where there is any, else of waves."""
    folder = tmp_path_factory.mktemp("images")
    if real_cifar.there:
        pixels = real_cifar.images("test", IMAGES)[0]
    else:
        waves = np.random.default_rng(0).uniform(0.02, 0.4, (IMAGES, 1, 1, 3))
        pixels = (127 * (1 + np.sin(np.add.outer(np.arange(32), 2 * np.arange(32))[..., None] * waves))).astype(
            np.uint8
        )
    for index, image in enumerate(pixels):
        size = (32, 32) if index % 4 == 0 else (33 + index, 90 - index)
        Image.fromarray(image).resize(size, Image.Resampling.BICUBIC).save(folder / f"{index:02d}.png")
    return folder


@pytest.fixture(scope="module")
def models(images: Path) -> list[nn.Module]:
    """A pruned residual network and a pruned transformer, whose classes differ between the images."""
    torch.manual_seed(0)
    pixels = PREPARED(sorted(images.iterdir()))
    found = []
    for dense in (CifarResNet(8), VisionTransformer(32, 8, 2, 4, 32, 64, num_classes=10)):
        head = dense.linear if isinstance(dense, CifarResNet) else dense.heads[-1]
        nn.init.normal_(head.weight)
        pruned = pk.prune(dense.eval(), pixels[:8], macs=0.6).model.eval()
        with torch.no_grad():
            scores = pruned(pixels)
            last = pruned.linear if isinstance(dense, CifarResNet) else pruned.heads[-1]
            last.bias.copy_((last.bias - scores.mean(0)) / scores.std(0))
            last.weight /= scores.std(0)[:, None]
        found.append(pruned)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", DOORS)
def test_the_same_classes_in_a_process_that_has_only_the_runtime(
    name: str, models: list[nn.Module], images: Path, tmp_path: Path
) -> None:
    code, blocked = DOORS[name]
    pytest.importorskip({"onnx": "onnxruntime", "pt2": "torch"}.get(name, name))
    pixels = PREPARED(sorted(images.iterdir()))
    facts = {"task": "classification", "classes": CLASSES, "preprocessing": PREPARED}
    files, wanted = [], []
    for index, model in enumerate(models):
        files.append(str(write(name, source_of(model, (pixels[:2],), **facts), tmp_path / str(index))))
        with torch.no_grad():
            wanted.append([CLASSES[index] for index in model(pixels).argmax(1)])
        assert len(set(wanted[-1])) > 2
    program = f"BLOCKED = {blocked!r}\n{FEEDING}\n{code}"
    said = subprocess.run(
        [sys.executable, "-I", "-c", program, str(images), *files], capture_output=True, text=True, check=False
    )
    assert said.returncode == 0, said.stderr
    assert [json.loads(line) for line in said.stdout.splitlines()] == wanted
