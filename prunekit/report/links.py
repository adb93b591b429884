"""Addresses of pages, from each other."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote


def linked(target: Path, page: Path) -> str:
    """Address of a file as seen from the page's folder: it stays right where all are moved together."""
    try:
        return quote(os.path.relpath(target.resolve(), page.resolve().parent).replace(os.sep, "/"))
    except ValueError:  # on another drive
        return target.resolve().as_uri()
