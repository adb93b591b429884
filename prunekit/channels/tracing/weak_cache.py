"""Results of functions of classes, kept as long as the classes live."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple
from weakref import WeakKeyDictionary

Key = TypeVar("Key")
Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")


def weak_cache(function: Callable[[Key, *Arguments], Result]) -> Callable[[Key, *Arguments], Result]:
    """Cache a function of a class, or of another object, as long as that lives.

    `functools.lru_cache` would keep the class alive, with all that its methods refer to: classes that are made again
    and again, by a trace or in a notebook, would pile up.

    Args:
        function: of the object, and of further arguments, by position and hashable. Neither these nor its result may
            refer to the object.
    """
    kept: WeakKeyDictionary[Key, dict[Any, Result]] = WeakKeyDictionary()

    @functools.wraps(function)
    def cached(key: Key, *args: *Arguments) -> Result:
        results = kept.setdefault(key, {})
        if args not in results:
            results[args] = function(key, *args)
        return results[args]

    return cached
