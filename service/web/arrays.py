"""Arrays of numbers from JSON lists, in linear time; strings, booleans and null are no numbers."""

from array import array
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

DEEPEST = 32  # nested lists


def array_of(data: list[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """A flat or nested list as an array of float32 or float64; raises ValueError where it is no array of numbers."""
    shape: list[int] = []
    level = data
    try:
        while level and type(level[0]) is list:
            shape.append(len(level))
            if len(shape) > DEEPEST or len(set(map(len, level))) > 1:
                raise ValueError
            level = list(chain.from_iterable(level))
        flat = np.frombuffer(array("f" if dtype.itemsize == 4 else "d", level), dtype)  # refuses strings and null
    except TypeError:
        raise ValueError from None
    if ((flat == 0) | (flat == 1)).any() and bool in set(map(type, level)):
        raise ValueError
    sizes = [below // above for above, below in zip([1, *shape], [*shape, len(level)], strict=True)]
    return flat.reshape(sizes)
