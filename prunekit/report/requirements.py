"""The optional packages that reports need."""

from importlib.util import find_spec

from prunekit.errors import UsageError


def require_report() -> None:
    """Raise, before any work, if packages for pictures or TensorBoard's events are not installed."""
    missing = [package for package in ("matplotlib", "tensorboard") if find_spec(package) is None]
    if missing:
        raise UsageError(f'pictures and reports need {" and ".join(missing)}: pip install "prunekit[report]"')
