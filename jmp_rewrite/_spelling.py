"""Every way to write what a policy is made of, and what is said of the wrong ones."""

import difflib
import math
import re
from collections.abc import Mapping
from types import EllipsisType, MappingProxyType
from typing import Any, Literal, Protocol, TypeAlias, get_args

import jax
import ml_dtypes
import numpy as np
from jax.extend.core import Primitive

from jmp_rewrite._rules import RULES, Category, dtype_name

PolicyName: TypeAlias = Literal[
    "auto",
    "float32",
    "mixed_bfloat16",
    "mixed_float16",
    "bfloat16",
    "float16",
    "bf16",
    "fp16",
    "fp32",
    "f16",
    "f32",
]
"""The policies' names and their short forms."""

CategoryName: TypeAlias = Literal["allow", "infer", "deny", "clear"]
"""The strings of `Category`."""

ScopePrecision: TypeAlias = Literal["float32", "half"]
"""What a scope may ask for."""

LossScale: TypeAlias = str | float | None


class PolicyObject(Protocol):
    """A policy of another library, such as `jmp.Policy` or Keras' `DTypePolicy`."""

    @property
    def compute_dtype(self) -> Any:
        """The dtype of matrix multiplications."""


class ScalarType(Protocol):
    """A scalar type of JAX, such as `jnp.float16`: callable, but no function."""

    @property
    def __numpy_dtype__(self) -> np.dtype[Any]:
        """Its dtype, by NumPy's protocol; modules have a `dtype` as well."""

    def __call__(self, x: Any, /) -> jax.Array:
        """Makes an array of its dtype."""


DTypeLike: TypeAlias = np.dtype[Any] | type[np.generic] | ScalarType
"""A dtype, or a scalar type of NumPy or JAX."""


DTYPES = MappingProxyType(
    {
        "bfloat16": np.dtype(ml_dtypes.bfloat16),
        "float16": np.dtype(np.float16),
        "float32": np.dtype(np.float32),
    }
)

_KNOWN = (
    "a policy: 'mixed_float16', 'mixed_bfloat16', 'float32', 'auto', a dtype (float16, "
    "bfloat16, float32), or jmp's form 'params=float32,compute=float16,output=float32'"
)

# https://github.com/google-deepmind/jmp, jmp/_src/policy.py: get_policy, parse_dtype
_JMP_KEYS = {"p": "params", "c": "compute", "o": "output"}
_JMP_DTYPES = {
    "f16": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "fp32": "float32",
    "full": "float32",
}
_NAMES: tuple[str, ...] = get_args(PolicyName)
# Below this likeness a suggestion is a guess: "half" might be either half dtype.
_ALIKE, _VERY_ALIKE = 0.6, 0.75

# Short names of devices, as Cloud, JAX and people write them.
DEVICE_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "v5litepod": "TPU v5e",
        "v5lite": "TPU v5e",
        "v6lite": "TPU v6e",
        "trillium": "TPU v6e",
        "v7x": "TPU7x",
        "7x": "TPU7x",
        "ironwood": "TPU7x",
        "a10080gb": "NVIDIA A100",
        "h10080gb": "NVIDIA H100",
        "h100sxm": "NVIDIA H100",
        "a6000": "NVIDIA RTX A6000",
    }
)


def short_device_name(name: str) -> str:
    """Leaves out of a device's name what people write in one way or the other."""
    text = re.sub(r"[\s_\-]", "", name.lower())
    return re.sub(r"^(nvidia|google|cloud)*(tpu)?", "", text)


def as_written(given: Any) -> Any:
    """Returns a policy as the text or dtype by which it may be written.

    Another library's policy is its string, a dtype its name.
    """
    if isinstance(given, str):
        return given
    if not isinstance(given, type) and hasattr(given, "compute_dtype"):
        return _of_another_library(given)
    if isinstance(given, jax.Array | np.ndarray | np.generic):
        shape = list(np.shape(given))
        raise TypeError(
            f"expected {_KNOWN}; got an array of shape {shape}: was the function "
            "called? Decorate the function itself"
        )
    if not isinstance(given, type | np.dtype):
        raise TypeError(f"expected {_KNOWN}; got {given!r}")
    try:
        return dtype_name(given)
    except (TypeError, ValueError) as error:
        raise type(error)(f"expected {_KNOWN}; got {given!r}") from None


def _of_another_library(given: Any) -> str:
    """Reads the string of a policy: Keras' `name`, or what `str` gives of jmp's."""
    name = getattr(given, "name", None)
    text = name if isinstance(name, str) else str(given)
    stored = str(getattr(given, "variable_dtype", "float32"))  # Keras'
    if stored != "float32":
        raise ValueError(
            f"expected a policy with float32 variables, got {text!r}, whose variables "
            f"are {stored}: parameters keep their dtypes, so write 'mixed_{stored}'"
        )
    return text


def parse_compute_dtype(written: str) -> str:
    """Returns `"float16"`, `"bfloat16"`, `"float32"` or `"auto"`."""
    if written == "auto":
        return written
    if "=" in written:
        return _parse_jmp(written)
    try:
        return dtype_name(written)
    except ValueError:
        near = _nearest(written)
        hint = f": did you mean {near!r}?" if near else ""
        raise ValueError(f"expected {_KNOWN}; got {written!r}{hint}") from None


def _nearest(written: str) -> str | None:
    """Returns the policy that is most like what was written, if any is.

    A part that is a name says more than the letters: "bf16-mixed" and "fp16_O1".
    """
    small = written.strip().lower()
    parts = [part for part in re.split(r"[^a-z0-9]+", small) if part in _NAMES]
    for found in (
        difflib.get_close_matches(small, _NAMES, n=1, cutoff=_VERY_ALIKE),
        parts,
        difflib.get_close_matches(small, _NAMES, n=1, cutoff=_ALIKE),
    ):
        if found:
            return found[0]
    return None


def parse_reduce_dtype(given: Any, compute_dtype: str) -> str | None:
    """Returns `"float32"`, `"float16"`, `"bfloat16"`, or None for the default."""
    if given is None:
        return None
    expected = (
        "expected reduce_dtype None, float32 or the compute dtype, "
        f"{'which auto leaves open' if compute_dtype == 'auto' else compute_dtype}"
    )
    try:
        name = dtype_name(given)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{expected}; got {given!r}") from None
    if name not in ("float32", compute_dtype):
        raise ValueError(f"{expected}; got {given!r}")
    return name


def _parse_jmp(text: str) -> str:
    parts = dict.fromkeys(("params", "compute", "output"), "float32")
    seen: set[str] = set()
    for part in text.split(","):
        key, _, value = (piece.strip() for piece in part.partition("="))
        key = _JMP_KEYS.get(key, key)
        if key not in parts:
            raise ValueError(f"expected {_KNOWN}; got {text!r}, which names {key!r}")
        if key in seen or "=" in value:
            raise ValueError(
                f"expected {_KNOWN}; got {text!r}: name each once, commas between them"
            )
        seen.add(key)
        parts[key] = _JMP_DTYPES.get(value, value)
    if parts["compute"] not in DTYPES:
        raise ValueError(f"expected {_KNOWN}; got {text!r}")
    for key in ("params", "output"):
        if parts[key] != "float32":
            raise ValueError(
                f"expected {key}=float32, got {key}={parts[key]} in {text!r}: "
                "parameters and results keep their dtypes, so cast them outside"
            )
    return parts["compute"]


def parse_rules(rules: Mapping[Any, Category | str]) -> dict[str, Category]:
    _expect_mapping("rules", "of primitive name to category", rules)
    parsed: dict[str, Category] = {}
    for key in rules:
        name, category = _parse_rule(key), _parse_category(key, rules[key])
        if parsed.setdefault(name, category) is not category:
            raise ValueError(
                f"expected one category for {name!r}, got {parsed[name].value!r} and "
                f"{category.value!r}"
            )
    return parsed


# What functions of JAX are made of.
_PRIMITIVES = {
    "einsum": "dot_general",
    "matmul": "dot_general",
    "mean": "reduce_sum",
    "softmax": "exp",
    "tensordot": "dot_general",
}


class _Own(str):
    """The name of a primitive that was given as a `Primitive`; it prints as that."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _parse_rule(key: object) -> str:
    if isinstance(key, Primitive):
        return _Own(key.name)
    if isinstance(key, _Own):  # out of another policy's `rules`
        return key
    if not isinstance(key, str):
        raise TypeError(f"expected a primitive's name or a Primitive, got {key!r}")
    if key not in RULES:
        longer = [name for name in RULES if name.startswith(f"{key}_")]  # "dot"
        longer = [_PRIMITIVES[key]] if key in _PRIMITIVES else longer
        (nearest,) = difflib.get_close_matches(key, longer or RULES, n=1, cutoff=0.0)
        raise ValueError(
            "expected the name of a JAX primitive, as jax.make_jaxpr prints it, got "
            f"{key!r}: the nearest is {nearest!r}; for one of your own, give the "
            "Primitive itself"
        )
    return key


def _parse_category(key: object, category: object) -> Category:
    if isinstance(category, Category):
        return category
    if not isinstance(category, str):
        raise TypeError(
            f"expected a Category or a string, got {category!r} for {key!r}"
        )
    try:
        return Category(category)
    except ValueError:
        known = ", ".join(repr(known.value) for known in Category)
        raise ValueError(
            f"expected a category, one of {known}, got {category!r} for {key!r}"
        ) from None


def parse_scopes(scopes: Mapping[str, str], dtype: str) -> dict[str, str]:
    _expect_mapping("scopes", "of regular expression to precision", scopes)
    for pattern, precision in scopes.items():
        if not isinstance(pattern, str):
            raise TypeError(f"expected a regular expression, got {pattern!r} in scopes")
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"expected a regular expression, got {pattern!r} in scopes: {error}"
            ) from None
        if precision not in ("float32", "half"):
            raise ValueError(
                f"expected 'float32' or 'half' for the scope {pattern!r}, "
                f"got {precision!r}"
            )
        if precision == "half" and dtype == "float32":
            raise ValueError(
                f"the scope {pattern!r} asks for 'half', but a float32 policy has no "
                "half dtype: name 'mixed_bfloat16' or 'mixed_float16'"
            )
    return dict(scopes)


def _expect_mapping(name: str, of_what: str, given: object) -> None:
    if not isinstance(given, Mapping):
        raise TypeError(f"expected {name} to be a mapping {of_what}, got {given!r}")


def parse_loss_scale(given: Any) -> LossScale | EllipsisType:
    expected = f"expected loss_scale 'dynamic', None or a number > 0, got {given!r}"
    if given is None or given is ...:
        return given
    if isinstance(given, str):
        if given != "dynamic":
            raise ValueError(expected)
        return given
    if isinstance(given, np.generic):
        given = given.item()
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise TypeError(expected)
    if not (math.isfinite(given) and given > 0):
        raise ValueError(expected)
    return given
