"""A matplotlib figure that a notebook shows by itself.

Jupyter draws a plain `Figure` only after `matplotlib.pyplot` has loaded its backend.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new(caller: str, **kwargs: Any) -> Figure:
    """Returns an empty figure.

    Args:
      caller: the user's call, for the error.
      **kwargs: those of `matplotlib.figure.Figure`.

    Raises:
      ImportError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(
            f"{caller} needs matplotlib: pip install 'jmp_rewrite[report]'"
        ) from None

    class Shown(Figure):
        def _repr_png_(self) -> bytes:
            png = io.BytesIO()
            self.savefig(png, format="png")
            return png.getvalue()

    return Shown(**kwargs)
