"""Matrix multiplications with float32 results that are differentiated later."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from jmp_rewrite import _compat
from jmp_rewrite._emit.later import Later
from jmp_rewrite._graph import FLOAT32


def float32_result(eqn: Any, operands: Sequence[Any], later: Later) -> Any:
    """Multiplies half operands to a float32 result, with half products backward.

    JAX's own derivative of such a product multiplies a float32 cotangent by a half
    operand, which no device has a fast kernel for. Here tangents are products with half
    results, so that a cotangent is rounded before it is multiplied.

    Args:
      eqn: the equation of the product.
      operands: two half arrays.
      later: runs what a rule makes when it is called.
    """
    finish = later.finish  # `later` holds the program
    full = dict(eqn.params, preferred_element_type=FLOAT32)
    params = dict(eqn.params, preferred_element_type=operands[0].dtype)

    def tangent(position: int, primals: Sequence[Any], change: Any) -> Any:
        factors = [change if i == position else x for i, x in enumerate(primals)]
        (product,) = _compat.bind(eqn, factors, params)
        return _compat.convert(product, FLOAT32)

    def multiply(*operands: Any) -> Any:
        (product,) = _compat.bind(eqn, operands, full)
        return product

    product = jax.custom_jvp(multiply)

    def rule(primals: Any, tangents: Any) -> tuple[Any, Any]:
        changes = [
            tangent(i, primals, t)
            for i, t in enumerate(tangents)
            if not isinstance(t, SymbolicZero)
        ]
        # Not `product`: a checkpoint's policy looks for the primitive.
        (out,) = finish(lambda *primals: [multiply(*primals)], primals)
        return out, functools.reduce(jax.lax.add, changes)

    product.defjvp(rule, symbolic_zeros=True)
    return product(*operands)
