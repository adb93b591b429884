"""Images that cannot be read: skipped, each counted once, and an error when they are too many."""

from __future__ import annotations

from collections.abc import Mapping

from prunekit.errors import DataError


class CorruptImages:
    """The corrupt images found so far, by name with the reason; shared by all parts of a data set.

    Args:
        limit: how many may be skipped.
    """

    def __init__(self, limit: int = 0) -> None:
        self.limit = limit
        self.found: dict[str, str] = {}

    @classmethod
    def allowing(cls, limit: int | float, images: int) -> CorruptImages:
        """None found yet; the limit is a number, or a share (0..1) of so many images, rounded down."""
        return cls(limit if isinstance(limit, int) else int(limit * images))

    def add(self, name: str, reason: str) -> None:
        """Counts one more, unless it is known.

        Raises:
            DataError: there are more than the limit; gives their number and names the first few.
        """
        self.merge({name: reason})

    def merge(self, found: Mapping[str, str]) -> None:
        """Counts what another process found.

        Raises:
            DataError: as for `add`.
        """
        self.found.update({name: reason for name, reason in found.items() if name not in self.found})
        if len(self.found) <= self.limit:
            return
        first = [f"{name}: expected an image, but {reason}" for name, reason in list(self.found.items())[:3]]
        if not self.limit:
            raise DataError(f"{first[0]}; remove or replace it, or let some be skipped with data.max_corrupt=N")
        raise DataError(
            f"{len(self.found)} images cannot be read, and data.max_corrupt allows {self.limit}; remove or replace "
            f"them: {'; '.join(first)}" + ("; ..." if len(self.found) > 3 else "")
        )


def describe_corrupt(found: Mapping[str, str]) -> str:
    """One line about images that were skipped, with the first few names."""
    names = ", ".join(list(found)[:3])
    return f"{len(found)} corrupt image{'s'[: len(found) != 1]} skipped: {names}" + (", ..." if len(found) > 3 else "")
