"""Keras models whose step is decorated too late to be used.

Keras compiles `train_step` at the first `fit` and keeps what came out until the next
`compile` (keras/src/backend/jax/trainer.py, `make_train_function`). A step that is
decorated between the two is never called, and nobody says so.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any

from jmp_rewrite._source import user_level

# The method of a `keras.Model`, and where Keras keeps what it made of it.
_COMPILED = {
    "train_step": "train_function",
    "test_step": "test_function",
    "predict_step": "predict_function",
}


def watch(fun: Callable[..., Any], decorated: Callable[..., Any]) -> None:
    """Sees to a warning if a Keras model goes on with the step it had before.

    Args:
      fun: what is decorated, perhaps a model's `train_step`.
      decorated: what the model's attribute of that name becomes.
    """
    kind = getattr(sys.modules.get("keras"), "Model", None)
    name = getattr(fun, "__name__", "")
    if kind is None or not inspect.ismethod(fun) or name not in _COMPILED:
        return
    model = fun.__self__
    if not isinstance(model, kind):
        return
    kept = _COMPILED[name]
    before = getattr(model, kept)
    if before is None:
        return

    def step(*args: Any, **kwargs: Any) -> Any:
        setattr(model, kept, before)
        if getattr(model, name) is decorated:
            warnings.warn(
                f"mixed_precision decorated {name} after Keras had compiled it, so "
                "the decorated step is not used: call model.compile(...) again after "
                "the line that decorates it",
                stacklevel=user_level(),
            )
        return before(*args, **kwargs)

    setattr(model, kept, step)
