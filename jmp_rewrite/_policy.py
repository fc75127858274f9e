"""What a user asks for: the `Policy`, its default, and every way to spell one."""

import contextlib
import dataclasses
import difflib
import functools
import logging
import math
import re
from collections.abc import Iterator, Mapping
from types import EllipsisType, MappingProxyType
from typing import Any, NoReturn, TypeAlias

import jax
import ml_dtypes
import numpy as np
from jax.extend.core import Primitive

from jmp_rewrite._devices import DeviceCheck, auto_compute_dtype, check_devices
from jmp_rewrite._rules.table import RULES, Category, default_rules, dtype_name

LossScale: TypeAlias = str | float | None

_LOGGER = logging.getLogger("jmp_rewrite")

_DTYPES = MappingProxyType(
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
    "bf16": "bfloat16",
    "f32": "float32",
    "full": "float32",
}


class Policy:
    """What runs in which precision: a compute dtype, and what departs from its rules.

    Frozen and hashable, so it can be a static argument of `jax.jit`. It prints as it
    was written; two policies are equal if they mean the same, `Policy("mixed_float16")`
    and `Policy(jnp.float16)` for example.

    Args:
        compute_dtype: the dtype of products: `"mixed_float16"`, `"mixed_bfloat16"` or
            `"float32"`; `"auto"`, which asks this process's device each time that it is
            used (see `auto_compute_dtype`); a dtype; or jmp's form
            `"params=float32,compute=float16,output=float32"`, short `"c=f16"`.
        rules: primitive name to `Category` (or its string), over the defaults, for
            example `{"exp": "infer"}`. A `Primitive` object stands for one's own.
        scopes: regular expression to `"float32"` or `"half"`, searched in the path of
            name scopes, for example `{"decoder/lm_head": "float32"}`.
        loss_scale: `"dynamic"`, a number > 0, or `None`. By default `"dynamic"` for
            float16, whose gradients underflow, and `None` otherwise. Only
            `make_train_step` and the user read it.

    Raises:
        ValueError: for an unknown string, dtype, rule, category or scope value; a
            pattern that is no regular expression; a scope `"half"` under float32; a
            loss scale that is not positive and finite; or jmp's form with other
            parameters or outputs than float32, since results keep their dtypes.
        TypeError: for an argument of a wrong type.

    Example:
        >>> policy = Policy("mixed_float16", rules={"exp": "infer"})
        >>> policy
        Policy('mixed_float16', rules={'exp': 'infer'})
        >>> policy.compute_dtype == "float16", policy.loss_scale
        (True, 'dynamic')
    """

    __slots__ = ("_dtype", "_key", "_loss_scale", "_rules", "_scopes", "_written")

    _dtype: str
    _key: tuple
    _loss_scale: LossScale | EllipsisType
    _rules: Mapping[str, Category]
    _scopes: Mapping[str, str]
    _written: Mapping[str, Any]

    def __init__(
        self,
        compute_dtype: Any,
        *,
        rules: Mapping[Any, Category | str] = MappingProxyType({}),
        scopes: Mapping[str, str] = MappingProxyType({}),
        loss_scale: LossScale | EllipsisType = ...,
    ) -> None:
        dtype = _parse_compute_dtype(compute_dtype)
        loss_scale = _parse_loss_scale(loss_scale)
        parsed_rules = _parse_rules(rules)
        parsed_scopes = _parse_scopes(scopes, dtype)
        default = "dynamic" if dtype == "float16" else ... if dtype == "auto" else None
        meant = default if loss_scale is ... else loss_scale
        values = {
            "_dtype": dtype,
            "_key": (
                dtype,
                frozenset(parsed_rules.items()),
                tuple(parsed_scopes.items()),
                meant,
            ),
            "_loss_scale": meant,
            "_rules": MappingProxyType(parsed_rules),
            "_scopes": MappingProxyType(parsed_scopes),
            "_written": _as_written(compute_dtype, rules, parsed_scopes, loss_scale),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def name(self) -> str:
        """`"mixed_float16"`, `"mixed_bfloat16"`, `"float32"` or `"auto"`."""
        return (
            self._dtype
            if self._dtype in ("auto", "float32")
            else f"mixed_{self._dtype}"
        )

    @property
    def compute_dtype(self) -> np.dtype:
        """The dtype of products: float16, bfloat16 or float32.

        Of `"auto"` it asks the device, which starts JAX's backend.
        """
        return auto_compute_dtype() if self._dtype == "auto" else _DTYPES[self._dtype]

    @property
    def param_dtype(self) -> np.dtype:
        """The dtype of parameters and of the train state, always float32."""
        return _DTYPES["float32"]

    @property
    def output_dtype(self) -> None:
        """Always `None`: results keep the dtypes that the function gives them."""
        return None

    @property
    def rules(self) -> Mapping[str, Category]:
        """What departs from the default rules: primitive name to `Category`."""
        return self._rules

    @property
    def scopes(self) -> Mapping[str, str]:
        """Regular expression to `"float32"` or `"half"`, in the order written."""
        return self._scopes

    @property
    def loss_scale(self) -> LossScale:
        """`"dynamic"`, a number or `None`: the second argument of `loss_scaling`."""
        if isinstance(self._loss_scale, EllipsisType):
            return "dynamic" if self.compute_dtype == "float16" else None
        return self._loss_scale

    def table(self) -> Mapping[str, Category]:
        """Return the whole rule table: the compute dtype's defaults under `rules`."""
        return _merged_table(self.compute_dtype.name, self._key[1])

    def replace(self, **changes: Any) -> "Policy":
        """Return a policy that differs in the given arguments of `Policy`.

        Example:
            >>> Policy("mixed_bfloat16").replace(scopes={"head": "float32"})
            Policy('mixed_bfloat16', scopes={'head': 'float32'})
        """
        return Policy(**{**self._arguments(), **changes})

    def _arguments(self) -> dict[str, Any]:
        return {
            name: dict(value) if isinstance(value, Mapping) else value
            for name, value in self._written.items()
        }

    def __repr__(self) -> str:
        first, *others = self._written.items()
        shown = [_shown(first[1]), *(f"{k}={_shown(v)}" for k, v in others)]
        return f"Policy({', '.join(shown)})"

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, Policy) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key)

    def __reduce__(self) -> tuple:
        return functools.partial(Policy, **self._arguments()), ()

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise dataclasses.FrozenInstanceError(
            f"a Policy is frozen: use policy.replace({name}=...)"
        )

    def __delattr__(self, name: str) -> NoReturn:
        raise dataclasses.FrozenInstanceError(
            f"a Policy is frozen: cannot delete {name}"
        )


PolicyLike: TypeAlias = Any
"""A `Policy`, a string or a dtype; `None` for the default policy."""


def as_policy(policy: PolicyLike) -> Policy:
    """Return the `Policy` that an argument means, wherever a policy is taken.

    Args:
        policy: a `Policy`, which is returned as it is; a string or a dtype, as
            `Policy` takes them; or `None`, which means `get_policy()`.

    Raises:
        ValueError: for an unknown string or dtype.
        TypeError: for anything else.
    """
    if policy is None:
        return get_policy()
    return policy if isinstance(policy, Policy) else Policy(policy)


# Its value is in the keys of jit's caches; `set_global` sets it for the process, a call
# for a thread: jax/_src/config.py, `UserConfig`, the same in JAX 0.10.2 to 0.12.
_CURRENT = jax.make_user_context(None)


def get_policy() -> Policy:
    """Return the policy that `policy=None` means: `Policy("auto")` unless set.

    Example:
        >>> with use_policy("mixed_float16"):
        ...     get_policy().loss_scale
        'dynamic'
    """
    return Policy("auto") if _CURRENT.value is None else _CURRENT.value


def set_policy(policy: PolicyLike) -> None:
    """Set the policy that `policy=None` means, in every thread of the process.

    Jitted code that depends on it is traced again.

    Args:
        policy: a `Policy`, a string or a dtype; `None` forgets what was set.

    Raises:
        ValueError: for an unknown policy; what was set stays.

    Example:
        >>> set_policy("mixed_bfloat16")
        >>> get_policy()
        Policy('mixed_bfloat16')
        >>> set_policy(None)
    """
    _CURRENT.set_global(None if policy is None else as_policy(policy))


@contextlib.contextmanager
def use_policy(policy: PolicyLike) -> Iterator[Policy]:
    """Set the policy that `policy=None` means for a block, in this thread.

    Args:
        policy: a `Policy`, a string or a dtype.

    Example:
        >>> with use_policy("mixed_bfloat16"):
        ...     get_policy()
        Policy('mixed_bfloat16')
    """
    policy = as_policy(policy)
    with _CURRENT(policy):
        yield policy


def is_policy_set() -> bool:
    """Whether `set_policy` or an enclosing `use_policy` has named a policy."""
    return _CURRENT.value is not None


def check_device(policy: PolicyLike = None) -> DeviceCheck:
    """Return, and log, whether a policy will be fast on this process's devices.

    Args:
        policy: a `Policy`, a string, a dtype, or `None` for the default policy.

    Returns:
        A `DeviceCheck`, whose `str()` is the message. It is logged to the logger
        `"jmp_rewrite"`: as information if all is well, else as a warning.

    Raises:
        ValueError: for an unknown policy.

    Example:
        >>> check = check_device("float32")
        >>> check.ok, check.policy
        (True, 'float32')
    """
    policy = as_policy(policy)
    dtype = policy.compute_dtype
    check = check_devices(Policy(dtype).name, dtype)
    _LOGGER.log(logging.INFO if check.ok else logging.WARNING, "%s", check.message)
    return check


@functools.lru_cache(maxsize=64)
def _merged_table(
    dtype: str, rules: frozenset[tuple[str, Category]]
) -> Mapping[str, Category]:
    return MappingProxyType({**default_rules(dtype), **dict(rules)})


def _parse_compute_dtype(given: Any) -> str:
    """Return `"float16"`, `"bfloat16"`, `"float32"` or `"auto"`."""
    if isinstance(given, str) and given == "auto":
        return given
    if isinstance(given, str) and "=" in given:
        return _parse_jmp(given)
    try:
        return dtype_name(given)
    except (TypeError, ValueError) as error:
        raise type(error)(f"expected {_KNOWN}; got {given!r}") from None


def _parse_jmp(text: str) -> str:
    parts = dict.fromkeys(("params", "compute", "output"), "float32")
    for part in text.split(","):
        key, _, value = (piece.strip() for piece in part.partition("="))
        key = _JMP_KEYS.get(key, key)
        if key not in parts:
            raise ValueError(f"expected {_KNOWN}; got {text!r}, which names {key!r}")
        parts[key] = _JMP_DTYPES.get(value, value)
    if parts["compute"] not in _DTYPES:
        raise ValueError(f"expected {_KNOWN}; got {text!r}")
    for key in ("params", "output"):
        if parts[key] != "float32":
            raise ValueError(
                f"expected {key}=float32, got {key}={parts[key]} in {text!r}: "
                "parameters and results keep their dtypes, so cast them outside"
            )
    return parts["compute"]


def _parse_rules(rules: Mapping[Any, Category | str]) -> dict[str, Category]:
    _expect_mapping("rules", "of primitive name to category", rules)
    return {_parse_rule(key): _parse_category(key, rules[key]) for key in rules}


def _parse_rule(key: object) -> str:
    if isinstance(key, Primitive):
        return key.name
    if not isinstance(key, str):
        raise TypeError(f"expected a primitive's name or a Primitive, got {key!r}")
    if key not in RULES:
        (nearest,) = difflib.get_close_matches(key, RULES, n=1, cutoff=0.0)
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


def _parse_scopes(scopes: Mapping[str, str], dtype: str) -> dict[str, str]:
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


def _parse_loss_scale(given: Any) -> LossScale | EllipsisType:
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


def _as_written(
    compute_dtype: Any,
    rules: Mapping[Any, Category | str],
    scopes: Mapping[str, str],
    loss_scale: LossScale | EllipsisType,
) -> Mapping[str, Any]:
    """Return the arguments as they were given, without those left at their default."""
    if not isinstance(compute_dtype, str):
        compute_dtype = dtype_name(compute_dtype)
    written: dict[str, Any] = {"compute_dtype": compute_dtype}
    if rules:
        written["rules"] = dict(rules)
    if scopes:
        written["scopes"] = scopes
    if loss_scale is not ...:
        written["loss_scale"] = loss_scale
    return MappingProxyType(written)


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        pairs = (f"{_shown(k)}: {_shown(v)}" for k, v in value.items())
        return f"{{{', '.join(pairs)}}}"
    return repr(value.value if isinstance(value, Category) else value)
