"""How Python and NumPy run while a program is rewritten."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import numpy as np


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Runs a block, or a function that it decorates, without the garbage collector.

    NumPy is silent: known numbers are computed as compilers do, whatever they become.

    A graph and the jaxprs that are made of it are hundreds of thousands of small
    objects, of which none is garbage before the end. The collector visits all of them
    again as they grow: two fifths of the time at 5,000 equations. What other threads
    leave is collected afterwards.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        if was_on:
            gc.enable()
