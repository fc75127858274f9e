"""A scan without what it adds up, and the products of stacks behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax import lax

from jmp_rewrite import _compat
from jmp_rewrite._passes.by_device import inlined
from jmp_rewrite._passes.edit import Body, Editor
from jmp_rewrite._passes.match import FLOAT32
from jmp_rewrite._passes.scans import scan_anew

if TYPE_CHECKING:
    from jmp_rewrite._passes.sums_behind_loops import Sums


def put_behind(editor: Editor, body: Body, index: int, sums: Sums) -> None:
    """Puts what a scan adds up behind it."""
    _Behind(editor, body, index, sums).put()


class _Behind:
    """The equations that stand in place of a scan."""

    def __init__(self, editor: Editor, body: Body, index: int, sums: Sums) -> None:
        self._editor, self._at, self._sums = editor, (body, index), sums
        self._scan = body.eqns[index]
        (self._inner,) = body.held[index]
        self._eqns: list[Any] = []
        self._outer: dict[Any, Any] = dict(
            zip(self._inner.invars, self._scan.invars, strict=True)
        )
        self._casts: dict[Any, Any] = {}
        self._merged: dict[tuple[Any, int], Any] = {}

    def put(self) -> None:
        """Puts them there."""
        gone = {*self._sums.carries, *self._sums.results}
        outs = self._loop(gone)
        kept = [i for i in range(len(self._scan.outvars)) if i not in gone]
        results = dict(zip(kept, outs, strict=False))
        stacked = dict(zip(self._sums.stacks, outs[len(kept) :], strict=True))
        env = {v: self._stack(s, stacked) for v, s in self._sums.stack_of.items()}
        env.update(self._outer_carries())
        for at in sorted(self._sums.equations):
            self._equation(self._inner.eqns[at], env)
        for position in gone:
            results[position] = env[self._inner.outvars[position]]
        outvars = [results[i] for i in range(len(self._scan.outvars))]
        self._editor.put(*self._at, self._eqns, outvars)

    def _outer_carries(self) -> dict[Any, Any]:
        consts, carries = _compat.scan_split(self._scan.params)
        invars = self._inner.invars[consts : consts + carries]
        return {invars[k]: self._outer[invars[k]] for k in self._sums.carries}

    def _loop(self, gone: set[int]) -> list[Any]:
        """Emits the scan that is left; returns its results."""
        sums, jaxpr = self._sums, self._editor.jaxpr_of(self._inner)
        consts, carries = _compat.scan_split(self._scan.params)
        left = [i for i in range(len(jaxpr.invars)) if i - consts not in sums.carries]
        outvars = [v for i, v in enumerate(jaxpr.outvars) if i not in gone]
        eqns = [e for i, e in enumerate(jaxpr.eqns) if i not in sums.equations]
        new = _compat.with_body(
            self._scan.params["jaxpr"],
            invars=[jaxpr.invars[i] for i in left],
            eqns=eqns,
            outvars=[*outvars, *sums.stacks],
        )
        operands = [self._scan.invars[i] for i in left]
        carries -= len(sums.carries)
        made, outs = scan_anew(self._scan, new, consts, carries, operands)
        self._eqns += made
        return outs

    # ---- equations

    def _equation(self, eqn: Any, env: dict[Any, Any]) -> None:
        """Emits an equation of the body on what all iterations have made."""
        like = self._moved(eqn)
        if eqn.primitive.name == "dot_general":
            outs = [self._product(eqn, like, env)]
        elif eqn.primitive.name == "reduce_sum":
            outs = self._sum(eqn, like, env)
        else:
            operands = [env.get(v, v) for v in eqn.invars]
            outs = self._emit(
                like, lambda *xs: _compat.bind(eqn, xs, eqn.params), operands
            )
        env.update(zip(eqn.outvars, outs, strict=True))

    def _sum(self, eqn: Any, like: Any, env: dict[Any, Any]) -> list[Any]:
        """Emits a sum over the iterations as well, of the rounded operand."""
        cast = self._inner.made_by(eqn.invars[0])
        (wide,) = self._insert(
            like, lambda x: [_compat.convert(x, FLOAT32)], [env[cast.invars[0]]]
        )
        axes = (0, *(a + 1 for a in eqn.params["axes"]))
        params = dict(eqn.params, axes=axes)
        return self._emit(like, lambda x: _compat.bind(eqn, [x], params), [wide])

    def _product(self, eqn: Any, like: Any, env: dict[Any, Any]) -> Any:
        """Emits a product of stacks, or of a stack and what is the same everywhere."""
        stack_of = self._sums.stack_of
        on = [v in stack_of for v in eqn.invars]
        numbers = eqn.params["dimension_numbers"]
        contracted, batch = (
            tuple(
                tuple(d + by for d in dims) for dims, by in zip(side, on, strict=True)
            )
            for side in numbers
        )
        values = [
            env[v] if is_on else self._cast(v)
            for v, is_on in zip(eqn.invars, on, strict=True)
        ]
        if all(on):
            contracted = tuple((0, *dims) for dims in contracted)
            # As matrices, or XLA:TPU lays out the stacks for the product alone, and
            # slices of them are spread over all of memory in the forward pass.
            count = len(contracted[0])
            first = tuple(range(count))
            leading = contracted == (first, first) and batch == ((), ())
            if leading and all(map(_may_merge, values)):
                contracted = ((0,), (0,))
                values = [self._matrix(like, x, count) for x in values]
        params = dict(eqn.params, dimension_numbers=(contracted, batch))
        (out,) = self._emit(like, lambda *xs: _compat.bind(eqn, xs, params), values)
        if all(on):
            return out
        rows = values[0].aval.ndim - len(contracted[0]) - len(batch[0])
        axis = len(batch[0]) + (0 if on[0] else rows)
        order = (axis, *(d for d in range(out.aval.ndim) if d != axis))
        (moved,) = self._insert(like, lambda x: [lax.transpose(x, order)], [out])
        return moved

    def _matrix(self, like: Any, x: Any, count: int) -> Any:
        """Returns a stack whose first dimensions are one."""
        if (x, count) not in self._merged:
            (self._merged[x, count],) = self._insert(
                like, lambda x: [_as_matrix(x, count)], [x]
            )
        return self._merged[x, count]

    # ---- values

    def _stack(self, var: Any, stacked: dict[Any, Any]) -> Any:
        return stacked[var] if var in stacked else self._cast(var)

    def _cast(self, var: Any) -> Any:
        """Returns in half what the scan is given for a variable of the body."""
        outer = self._outer[self._sums.given[var]]
        if outer.aval.dtype == var.aval.dtype:
            return outer
        if outer not in self._casts:
            dtype = var.aval.dtype
            (self._casts[outer],) = self._insert(
                self._scan, lambda x: [_compat.convert(x, dtype)], [outer]
            )
        return self._casts[outer]

    # ---- emission

    def _moved(self, eqn: Any) -> Any:
        """Returns an equation of the body as one at the place of the scan."""
        stacks = self._scan.source_info.name_stack, eqn.source_info.name_stack
        names = [e for stack in stacks for e in _compat.scope_elements(stack)]
        return _compat.with_name_stack(eqn, names, eqn.params)

    def _insert(
        self, like: Any, fun: Callable[..., Sequence[Any]], operands: Sequence[Any]
    ) -> list[Any]:
        """Emits what is no equation of the program: in the scope of the pass."""
        return self._emit(self._editor.in_own_scope(like), fun, operands)

    def _emit(
        self, like: Any, fun: Callable[..., Sequence[Any]], operands: Sequence[Any]
    ) -> list[Any]:
        avals = [v.aval for v in operands]
        with _compat.place_of(like, avals):
            closed = jax.make_jaxpr(fun)(*avals)
        eqns, outs = inlined(closed, operands, like)
        self._eqns += eqns
        return outs


def _as_matrix(x: Any, count: int) -> Any:
    """Returns a matrix of which no compiler knows what else was made of its stack."""
    return lax.optimization_barrier(x.reshape(-1, *x.shape[count:]))


def _may_merge(atom: Any) -> bool:
    """Whether no dimension of an array is sharded in the type."""
    return all(axis is None for axis in atom.aval.sharding.spec)
