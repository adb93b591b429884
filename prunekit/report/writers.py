"""A run, a sensitivity analysis, a latency profile, or a comparison of runs as one self-contained HTML page."""

from importlib.util import find_spec

from prunekit.errors import UsageError


def require_report() -> None:
    """Raise, before any work, where the packages that draw pictures and write TensorBoard's events are missing.

    Raises:
        UsageError: says what to install.
    """
    missing = [package for package in ("matplotlib", "tensorboard") if find_spec(package) is None]
    if missing:
        raise UsageError(f'pictures and reports need {" and ".join(missing)}: pip install "prunekit[report]"')
