"""What a user asks for: the `Policy`, its default, and every way to spell one."""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Iterator, Mapping
from types import EllipsisType, MappingProxyType
from typing import Any, NoReturn, TypeAlias

import jax
import numpy as np

from jmp_rewrite._devices import DeviceCheck, auto_compute_dtype, check_devices
from jmp_rewrite._rules import Category, default_rules
from jmp_rewrite._spelling import (
    DTYPES,
    CategoryName,
    DTypeLike,
    LossScale,
    PolicyName,
    PolicyObject,
    ScopePrecision,
    as_written,
    parse_compute_dtype,
    parse_loss_scale,
    parse_reduce_dtype,
    parse_rules,
    parse_scopes,
)

_LOGGER = logging.getLogger("jmp_rewrite")

# As empty as any other, but another object.
_NOT_GIVEN: Mapping[Any, Any] = MappingProxyType({})


class Policy:
    """What runs in which precision: a compute dtype, and exceptions from its rules.

    Frozen and hashable, so it can be a static argument of `jax.jit`. It prints as it
    was written; two policies are equal if they mean the same, `Policy("mixed_float16")`
    and `Policy(jnp.float16)` for example.

    Args:
        compute_dtype: the dtype of matrix multiplications: `"mixed_float16"`,
            `"mixed_bfloat16"` or `"float32"`, short `"fp16"`, `"bf16"`, `"f32"`;
            `"auto"`, which asks this process's device each time that it is used (see
            `auto_compute_dtype`); a dtype; jmp's form
            `"params=float32,compute=float16,output=float32"`, short `"c=f16"`; or the
            policy object of another library, `jmp.Policy` or Keras' `DTypePolicy`. Of
            a `Policy` it takes what is not given beside it.
        rules: primitive name to `Category` (or its string), overriding the defaults,
            for example `{"exp": "infer"}`. Give your own primitive as a `Primitive`
            object.
        scopes: regular expression to `"float32"` or `"half"`, searched in the path of
            name scopes, for example `{"decoder/lm_head": "float32"}`. `"half"` asks for
            half matrix multiplications, even where `rules` deny them, and frees what
            is around them from all but a `DENY`: that of the table, or of `rules`.
        loss_scale: `"dynamic"`, a number > 0, or `None`. By default `"dynamic"` for
            float16, whose gradients underflow, and `None` otherwise. It is
            for `make_train_step`, and for you: `loss_scaling(tx, policy.loss_scale)`.
        reduce_dtype: the dtype in which gradients are summed over devices. `None` is
            float32. The compute dtype sends half the bytes, as `reduce_dtype` of
            PyTorch's FSDP does, and rounds each device's part.

    Raises:
        ValueError: for an unknown string, dtype, rule, category or scope value; a
            pattern that is not a regular expression; a scope `"half"` under float32; a
            loss scale that is not positive and finite; a reduce_dtype other than
            float32 and the compute dtype; or other parameters or outputs than float32,
            in jmp's form or an object, since parameters and results keep their dtypes.
        TypeError: for an argument of a wrong type.

    Example:
        >>> policy = Policy("mixed_float16", rules={"exp": "infer"})
        >>> policy
        Policy('mixed_float16', rules={'exp': 'infer'})
        >>> policy.compute_dtype == "float16", policy.loss_scale
        (True, 'dynamic')
    """

    __slots__ = (
        "_dtype",
        "_key",
        "_loss_scale",
        "_reduce_dtype",
        "_rules",
        "_scopes",
        "_written",
    )

    _dtype: str
    _key: tuple
    _loss_scale: LossScale | EllipsisType
    _reduce_dtype: str
    _rules: Mapping[str, Category]
    _scopes: Mapping[str, ScopePrecision]
    _written: Mapping[str, Any]

    def __init__(
        self,
        compute_dtype: str | DTypeLike | PolicyObject,
        *,
        rules: Mapping[Any, Category | CategoryName] = _NOT_GIVEN,
        scopes: Mapping[str, ScopePrecision] = _NOT_GIVEN,
        loss_scale: LossScale | EllipsisType = ...,
        reduce_dtype: str | DTypeLike | EllipsisType | None = ...,
    ) -> None:
        if isinstance(compute_dtype, Policy):
            same = compute_dtype._written
            if rules is _NOT_GIVEN:
                rules = same.get("rules", rules)
            if scopes is _NOT_GIVEN:
                scopes = same.get("scopes", scopes)
            if loss_scale is ...:
                loss_scale = same.get("loss_scale", ...)
            if reduce_dtype is ...:
                reduce_dtype = same.get("reduce_dtype")
            compute_dtype = same["compute_dtype"]
        written = as_written(compute_dtype)
        dtype = parse_compute_dtype(written)
        reduced = parse_reduce_dtype(
            None if reduce_dtype is ... else reduce_dtype, dtype
        )
        loss_scale = parse_loss_scale(loss_scale)
        parsed_rules = parse_rules(rules)
        parsed_scopes = parse_scopes(scopes, dtype)
        default = "dynamic" if dtype == "float16" else ... if dtype == "auto" else None
        meant = default if loss_scale is ... else loss_scale
        values = {
            "_dtype": dtype,
            "_key": (
                dtype,
                frozenset(parsed_rules.items()),
                tuple(parsed_scopes.items()),
                meant,
                reduced if reduced != "float32" else None,
            ),
            "_loss_scale": meant,
            "_reduce_dtype": reduced or "float32",
            "_rules": MappingProxyType(parsed_rules),
            "_scopes": MappingProxyType(parsed_scopes),
            "_written": _arguments(written, rules, parsed_scopes, loss_scale, reduced),
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
        """The dtype of matrix multiplications: float16, bfloat16 or float32.

        Of `"auto"` it asks the device, which starts JAX's backend.
        """
        return auto_compute_dtype() if self._dtype == "auto" else DTYPES[self._dtype]

    @property
    def param_dtype(self) -> np.dtype:
        """The dtype of parameters and of the train state, always float32."""
        return DTYPES["float32"]

    @property
    def output_dtype(self) -> None:
        """Always `None`: results keep the dtypes that the function gives them."""
        return None

    @property
    def rules(self) -> Mapping[str, Category]:
        """What departs from the default rules: primitive name to `Category`."""
        return self._rules

    @property
    def scopes(self) -> Mapping[str, ScopePrecision]:
        """Regular expression to `"float32"` or `"half"`, in the order written."""
        return self._scopes

    @property
    def loss_scale(self) -> LossScale:
        """`"dynamic"`, a number or `None`: the second argument of `loss_scaling`."""
        if isinstance(self._loss_scale, EllipsisType):
            return "dynamic" if self.compute_dtype == "float16" else None
        return self._loss_scale

    @property
    def reduce_dtype(self) -> np.dtype:
        """The dtype in which gradients are summed over devices: float32 by default."""
        return DTYPES[self._reduce_dtype]

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


PolicyLike: TypeAlias = Policy | PolicyName | DTypeLike | PolicyObject | None
"""What stands for a policy: a name, a dtype or an object; `None` for the default.

A string that is not known before the program runs, and jmp's form, are `Policy(text)`.
"""


def as_policy(policy: PolicyLike) -> Policy:
    """Return the `Policy` that an argument means, wherever a policy is taken.

    Args:
        policy: a `Policy`, which is returned as it is; a string, a dtype or another
            library's object, as `Policy` takes them; or `None`, for `get_policy()`.

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
    """Return the default policy, which `policy=None` means: `"auto"` unless set.

    Example:
        >>> with use_policy("mixed_float16"):
        ...     get_policy().loss_scale
        'dynamic'
    """
    return Policy("auto") if _CURRENT.value is None else _CURRENT.value


def set_policy(policy: PolicyLike) -> None:
    """Set the default policy, which `policy=None` means, in every thread.

    Jitted code that depends on it is traced again.

    Args:
        policy: a `Policy`, a string or a dtype; `None` resets it to `"auto"`.

    Raises:
        ValueError: for an unknown policy; the default policy stays as it was.

    Example:
        >>> set_policy("mixed_bfloat16")
        >>> get_policy()
        Policy('mixed_bfloat16')
        >>> set_policy(None)
    """
    _CURRENT.set_global(None if policy is None else as_policy(policy))


@contextlib.contextmanager
def use_policy(policy: PolicyLike) -> Iterator[Policy]:
    """Set the default policy for a block of code, in this thread.

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
    """Whether a policy will be fast on this process's devices; the answer is logged.

    Args:
        policy: a `Policy`, a string, a dtype, or `None` for the default policy.

    Returns:
        A `DeviceCheck`, whose `str()` is the message. It is logged to the logger
        `"jmp_rewrite"`: as information if it is fast, as a warning otherwise.

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


def _arguments(
    compute_dtype: str,
    rules: Mapping[Any, Category | str],
    scopes: Mapping[str, str],
    loss_scale: LossScale | EllipsisType,
    reduce_dtype: str | None,
) -> Mapping[str, Any]:
    """Return the arguments as they were given, without those left at their default."""
    written: dict[str, Any] = {"compute_dtype": compute_dtype}
    if rules:
        written["rules"] = dict(rules)
    if scopes:
        written["scopes"] = scopes
    if loss_scale is not ...:
        written["loss_scale"] = loss_scale
    if reduce_dtype is not None:
        written["reduce_dtype"] = reduce_dtype
    return MappingProxyType(written)


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        pairs = (f"{_shown(k)}: {_shown(v)}" for k, v in value.items())
        return f"{{{', '.join(pairs)}}}"
    return repr(value.value if isinstance(value, Category) else value)
