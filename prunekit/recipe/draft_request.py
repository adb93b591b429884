"""Requests for a draft of a recipe: a model and a data set as `prunekit init` names them, checked without torch."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prunekit.data.roots import SETS
from prunekit.errors import DataError, ModelError, UsageError, nearest
from prunekit.models.names import ZOOS, bare_names
from prunekit.utils.user_code import is_reference, require_object

FORMS = (
    "digits, a folder with one folder of images for each class or of images without labels, an .npz file, a data set "
    "of torchvision such as CIFAR10, one of Hugging Face's such as uoft-cs/cifar10, a file of text or a folder of "
    "such, or file.py:factory"
)


@dataclass(frozen=True)
class DraftRequest:
    """The model and data that a recipe is written for."""

    model: str  # name of a zoo's model, the folder of one of transformers, or `file.py:factory`
    data: str  # see `FORMS`
    zoo: str | None = None  # zoo of the model; None: torchvision, else cifar
    weights: str | None = None  # of the dense model, a file or one of torchvision's names; None: it is trained first
    changes: tuple[str, ...] = ()  # overrides of what is proposed, `key=value` each

    @property
    def own(self) -> tuple[str | None, str | None]:
        """The user's own code for the model and for the data, `file.py:factory` each; None where there is none."""
        return _code(self.model), _code(self.data)


def _code(text: str) -> str | None:
    return text if is_reference(text) else None


def require_known(request: DraftRequest) -> None:
    """Raise for a model or data that no draft can be made of, as far as that is known before they are looked at."""
    zoos = ZOOS if request.zoo is None else [zoo for zoo in ZOOS if zoo == request.zoo]
    names = [name for zoo in zoos for name in bare_names(zoo)]
    if is_reference(request.model):
        require_object(request.model, ModelError)
    elif zoos and request.model not in names and not Path(request.model).is_dir():
        raise unknown_model(request, zoos, names)
    if is_reference(request.data):
        require_object(request.data, DataError)
    elif not (request.data in ("digits", *SETS) or Path(request.data).exists() or is_hub_name(request.data)):
        raise unknown_data(request.data)


def unknown_model(request: DraftRequest, zoos: Sequence[str], names: Sequence[str]) -> UsageError:
    """Return the error of a model that is in none of the zoos."""
    others = "" if request.zoo else "; models of timm and transformers are named with --zoo timm or --zoo hf"
    expected = f"expected a model of {' or '.join(zoos)}, or file.py:factory"
    return UsageError(f"--model {request.model}: {expected}; {nearest(request.model, names)}{others}")


def is_hub_name(asked: str) -> bool:
    """Return whether data is named as those of Hugging Face are, and is no path."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", asked) is not None and not Path(asked).parent.exists()


def unknown_data(asked: str) -> UsageError:
    """Return the error of data that is neither a path nor a known name."""
    near = nearest(asked, ["digits", *SETS])
    return UsageError(f"--data {asked}: there is no such file or folder; expected {FORMS}; {near}")
