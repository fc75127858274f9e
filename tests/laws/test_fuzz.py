"""Every law over random programs.

In a test run the programs are always the same ones. To look for new ones, say how many:
`JMP_REWRITE_FUZZ=5000 python -m pytest tests/laws/test_fuzz.py -s`.
"""

import collections
import functools
import os

import fuzz
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import EPS, HALF, PRODUCTS, dtypes_in, dtypes_out, shape_of, trace, walk
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from jax.extend import core as jex

from jmp_rewrite import (
    Category,
    Policy,
    default_rules,
    mixed_precision,
    mixed_precision_jaxpr,
)
from jmp_rewrite._rewrite import decide

POLICIES = ["mixed_bfloat16", "mixed_float16"]
MANY = int(os.environ.get("JMP_REWRITE_FUZZ", "0"))
# Rounding moves a result about as much as disturbances of the same size do.
FACTOR = 32


def programs(examples):
    """Runs a law on so many programs, or on as many as the environment asks for."""
    limits = settings(
        max_examples=MANY or examples,
        derandomize=not MANY,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    drawn = given(block=fuzz.blocks().filter(fuzz.is_valid), seed=st.integers(0, 2))
    return lambda law: limits(drawn(law))


TRIED = collections.Counter()


@pytest.fixture(scope="module", autouse=True)
def report():
    """Says how many programs were tried, where many were asked for."""
    yield
    if MANY:
        print(f"\nprograms tried: {dict(TRIED)}")


def count(law):
    TRIED[law] += 1
    if TRIED[law] % 200 == 0:
        jax.clear_caches()  # a long run would fill the memory


@pytest.mark.slow
@programs(14)
def test_structure(block, seed):
    """Types, no-op, idempotence, casts, deny: of the program and of its gradient."""
    count("structure")
    check_structure(block, seed)


@pytest.mark.slow
@programs(66)
def test_structure_of_more(block, seed):
    check_structure(block, seed)


@pytest.mark.slow
@programs(6)
def test_values(block, seed):
    """Values and gradients near those of float32, eagerly, jitted and mapped."""
    count("values")
    check_values(block, seed)


@pytest.mark.slow
@programs(26)
def test_values_of_more(block, seed):
    check_values(block, seed)


A, B = ("abs", (0, 0), ()), (("abs", (0, 0), ()),)
VECTOR = (("vector", (0, 0), ()),)
FOUND = {
    # A maximum of rounded copies was compared with float32 values, and none was equal.
    "maximum": (("scan_layers", (0, 0), ((("max_of_rows", (0, 0), ()),), B)),),
    # A number that is read as a literal was cast, and passed into the loop.
    "number": (
        (
            "fori",
            (0, 0),
            ((A, A, ("pad", (0, 0), ()), ("jvp", (0, 4), (VECTOR, B))), B),
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUND)
def test_known_failures_stay_mended(name):
    """Programs that broke a law once."""
    check_structure(FOUND[name], 0)
    check_values(FOUND[name], 0)


def check_structure(block, seed):
    fun, args = fuzz.function(block), fuzz.arguments(seed)
    forms = [fun]
    if fuzz.is_differentiable(block):
        forms.append(jax.grad(lambda *a: jnp.sum(fun(*a))))
    for form in forms:
        plain = trace(form, *args)
        exact = trace(mixed_precision(form, "float32"), *args)
        assert shape_of(exact) == shape_of(plain)
        assert mixed_precision_jaxpr(plain, "float32") is plain
        for policy in POLICIES:
            once = mixed_precision(form, policy)
            half = trace(once, *args)
            assert types(half) == types(plain)
            jex.check_jaxpr(getattr(half, "jaxpr", half))
            twice = trace(mixed_precision(once, policy), *args)
            assert shape_of(twice) == shape_of(half)
            if not {"half_inside", "inner_float16"} & fuzz.names(block):
                no_cast_undoes_another(half, policy)
                denied_is_full(half, policy)
            products_are_half(plain, policy)


def types(jaxpr):
    return [(a.shape, a.dtype, a.weak_type) for a in jaxpr.out_avals]


def no_cast_undoes_another(jaxpr, policy):
    made = {}
    for eqn in walk(jaxpr):
        if eqn.primitive.name == "convert_element_type":
            source = eqn.invars[0]
            before, after = source.aval.dtype, eqn.outvars[0].aval.dtype
            assert before != after or HALF[policy] != str(before)
            if str(before) == HALF[policy]:
                assert made.get(id(source)) != str(after)
            made[id(eqn.outvars[0])] = str(before)


def denied_is_full(jaxpr, policy):
    rules = default_rules(Policy(policy).compute_dtype)
    denied = {name for name, category in rules.items() if category is Category.DENY}
    denied -= {"reduce_precision"}  # to float32's own format it is none: a checkpoint's
    for eqn in walk(jaxpr):
        if eqn.primitive.name in denied:
            assert HALF[policy] not in dtypes_in(eqn) + dtypes_out(eqn)
        for var in eqn.outvars:
            if str(getattr(var.aval, "dtype", "")) == HALF[policy]:
                assert var.aval.shape != ()


def products_are_half(plain, policy):
    plan = decide(plain, Policy(policy))
    for node in plan.graph.nodes:
        if node.name in PRODUCTS and not plan.labels[node.index]:
            assert plan.pins.full[node.index]


QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def check_values(block, seed):
    args = fuzz.arguments(seed)
    policy = POLICIES[seed % 2]
    differentiable = fuzz.is_differentiable(block)

    def gradient(fun):
        return jax.grad(lambda *a: jnp.sum(jnp.sin(fun(*a))))

    def pair(fun):
        """Returns values, and gradients where there are any."""
        return (fun, gradient(fun)) if differentiable else (fun,)

    fun = fuzz.function(block)
    half = mixed_precision(fun, policy)
    mapped = jax.vmap(half, (0, None, None, None))
    forms = {
        "exact": pair(fun),
        "disturbed": pair(fuzz.function(block, noise=EPS[policy], seed=0)),
        "disturbed again": pair(fuzz.function(block, noise=EPS[policy], seed=1)),
        "outside": pair(half),
        "inside": tuple(mixed_precision(f, policy) for f in pair(fun)),
        "mapped": (lambda x, *a: mapped(x[None], *a)[0],),
    }

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(*args):
        return {name: [f(*args) for f in form] for name, form in forms.items()}

    found = run(*args)
    exact, *moved = (found.pop(k) for k in ("exact", "disturbed", "disturbed again"))
    if not all(np.isfinite(x).all() and abs(x).max() < 1e3 for x in exact):
        reject()
    for name, values in found.items():
        for value, expected, *others in zip(values, exact, *moved, strict=False):
            spread = max(float(abs(x - expected).max()) for x in others)
            size = max(1.0, float(abs(expected).max()))
            limit = FACTOR * (spread + EPS[policy] * size)
            error = float(abs(value - expected).max())
            said = f"{name} under {policy}: error {error}, limit {limit}"
            assert value.dtype == jnp.float32 and error <= limit, said
