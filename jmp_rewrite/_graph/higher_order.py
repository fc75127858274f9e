"""How primitives that hold jaxprs enter the graph: one function for each kind.

Each is given the builder, the equation, the values of its operands (None where a value
is nothing to follow), and where it stands; it returns what the equation holds, and the
values of its results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jmp_rewrite import _compat
from jmp_rewrite._graph.nodes import (
    SYMBOLIC,
    Count,
    Inner,
    Loop,
    Value,
    is_float32,
)
from jmp_rewrite._graph.scopes import Place
from jmp_rewrite._rules import CALLS

Builder = Any  # the one of `_graph/build.py`, which imports this module
Values = list[Value | None]
Nodes = tuple[int | None, ...]
Built = tuple[Inner, Values]


# A rule may say that what is one number has a derivative, and is another one mapped.
_HAVE_RULES = frozenset({"custom_jvp", "custom_vjp", "custom_vmap"})


def _local(value: Value | None, var: Any) -> Value | None:
    """Returns the value as the other side of a boundary sees it: with its type."""
    if value is None or value.aval is var.aval:
        return value
    return value.at(var.aval, value.slice_of)


def _locals(values: Sequence[Value | None], variables: Sequence[Any]) -> Values:
    return [_local(v, var) for v, var in zip(values, variables, strict=True)]


def call(b: Builder, eqn: Any, args: Values, place: Place, trips: int) -> Built:
    """A call is transparent: its parameters are the values that are passed."""
    kind, key = CALLS[eqn.primitive.name]
    b.has_backward_rules |= kind == "custom_vjp"
    jaxpr = eqn.params[key]
    inside = _locals(args, _compat.open_jaxpr(jaxpr).invars)
    shared = b.sharing_key(jaxpr, place)
    if shared is not None and kind == "call":
        return _shared_call(b, jaxpr, shared, inside, place, trips)
    body, results = b.use(jaxpr, b.captured(jaxpr), inside, place, trips)
    if kind in _HAVE_RULES:
        results = [None if v is None else v.unknown() for v in results]
    return Inner(kind, place, (body,)), _locals(results, eqn.outvars)


def _shared_call(
    b: Builder, jaxpr: Any, key: Any, args: Values, place: Place, trips: int
) -> Built:
    """A body that is analysed once for all its uses joins the values that come in."""
    record = b.shared.get(key)
    if record is None:
        avals = [v.aval for v in _compat.open_jaxpr(jaxpr).invars]
        joins = _joints(b, "join", [None] * len(avals), avals, place, trips)
        inside = [_made_by(b, node) for node in joins]
        body, results = b.use(jaxpr, b.captured(jaxpr), inside, place, trips)
        record = Inner("call", place, (body,), joins=joins), results
        b.shared[key] = record
    inner, results = record
    for join, value in zip(inner.joins, args, strict=True):
        if join is not None and value is not None:
            b.nodes[join].inputs.append(value)
    return inner, list(results)


def scan(b: Builder, eqn: Any, args: Values, place: Place, trips: int) -> Built:
    """A scan has constants, carries, and slices of its `xs`."""
    jaxpr = eqn.params["jaxpr"]
    num_consts, num_carry = _compat.scan_split(eqn.params)
    first = num_consts + num_carry
    invars = _compat.open_jaxpr(jaxpr).invars
    length = eqn.params["length"]
    trips *= max(length, 1) if isinstance(length, int) else SYMBOLIC
    start, token = len(b.nodes), next(b.tokens)
    avals = [v.aval for v in invars[num_consts:first]]
    carry_in = _joints(b, "carry_in", args[num_consts:first], avals, place, trips)
    inside = [
        *_locals(args[:num_consts], invars[:num_consts]),
        *(_made_by(b, node) for node in carry_in),
        *(
            a and a.at(v.aval, (*a.slice_of, token))
            for a, v in zip(args[first:], invars[first:], strict=True)
        ),
    ]
    for n in range(num_consts, first):
        if _counts(jaxpr, n, n - num_consts, args[n]):
            inside[n] = Value(invars[n].aval, slice_of=(token,), name=Count(token))
    body, outs = b.use(jaxpr, b.captured(jaxpr), inside, place, trips)
    carry_out = _close(b, carry_in, outs[:num_carry], place, trips)
    stacks, stacked = _stack(b, outs[num_carry:], eqn.outvars[num_carry:], place, trips)
    _loop(b, eqn, place, carry_in, carry_out, token, start)
    results = [*(_made_by(b, node) for node in carry_in), *stacked]
    return Inner("scan", place, (body,), carry_in, carry_out, stacks), results


def _counts(jaxpr: Any, parameter: int, result: int, start: Value | None) -> bool:
    """Whether a carry is a number that each iteration adds one to, as `fori_loop`'s."""
    body = _compat.open_jaxpr(jaxpr)
    var, handed_on = body.invars[parameter], body.outvars[result]
    if start is None or start.constant is None or start.aval.shape:
        return False
    if start.aval.dtype.kind not in "iu":
        return False
    for eqn in body.eqns:
        if handed_on in eqn.outvars:
            steps = [a.val for a in eqn.invars if hasattr(a, "val")]
            return (
                eqn.primitive.name == "add"
                and any(a is var for a in eqn.invars)
                and steps == [1]
            )
    return False


def _stack(
    b: Builder,
    values: Sequence[Value | None],
    variables: Sequence[Any],
    place: Place,
    trips: int,
) -> tuple[Nodes, Values]:
    """Adds a node for each float32 value that is stacked, and returns the stacks."""
    nodes: list[int | None] = []
    stacks: Values = []
    for value, var in zip(values, variables, strict=True):
        is_computed = value is not None and value.node >= 0 and value.constant is None
        if value is None or not is_computed or not is_float32(var.aval):
            nodes.append(None)
            stacks.append(_local(value, var))
            continue
        node = b.add("stack_out", None, place, [value], [value.aval], {}, trips)
        nodes.append(node)
        stacks.append(Value(var.aval, node, made_of_data=value.made_of_data))
    return tuple(nodes), stacks


def while_(b: Builder, eqn: Any, args: Values, place: Place, trips: int) -> Built:
    """A while loop has constants for its condition and its body, and carries."""
    cond, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    split = eqn.params["cond_nconsts"]
    first = split + eqn.params["body_nconsts"]
    start, token = len(b.nodes), next(b.tokens)
    avals = [v.aval for v in eqn.outvars]
    carry_in = _joints(b, "carry_in", args[first:], avals, place, trips)
    carried = [_made_by(b, node) for node in carry_in]
    test, _ = b.use(cond, b.captured(cond), [*args[:split], *carried], place, trips)
    step, outs = b.use(
        body, b.captured(body), [*args[split:first], *carried], place, trips
    )
    carry_out = _close(b, carry_in, outs, place, trips)
    _loop(b, eqn, place, carry_in, carry_out, token, start)
    return Inner("while", place, (test, step), carry_in, carry_out), carried


def cond(b: Builder, eqn: Any, args: Values, place: Place, trips: int) -> Built:
    """The results of all branches join: they have one dtype each."""
    uses = [
        b.use(jaxpr, b.captured(jaxpr), args[1:], place, trips)
        for jaxpr in eqn.params["branches"]
    ]
    joins = _joints(
        b,
        "join",
        [None] * len(eqn.outvars),
        [v.aval for v in eqn.outvars],
        place,
        trips,
    )
    for _, results in uses:
        for join, value in zip(joins, results, strict=True):
            if join is not None and value is not None:
                b.nodes[join].inputs.append(value)
    inner = Inner("cond", place, tuple(body for body, _ in uses), joins=joins)
    return inner, [_made_by(b, node) for node in joins]


def _joints(
    b: Builder,
    name: str,
    values: Sequence[Value | None],
    avals: Sequence[Any],
    place: Place,
    trips: int,
) -> Nodes:
    """Adds a node for each float32 value that loops or branches have to agree on."""
    return tuple(
        b.add(name, None, place, [] if value is None else [value], [aval], {}, trips)
        if is_float32(aval)
        else None
        for value, aval in zip(values, avals, strict=True)
    )


def _close(
    b: Builder, carry_in: Nodes, outs: Sequence[Value | None], place: Place, trips: int
) -> Nodes:
    """Adds what an iteration hands on, and closes the circle."""
    avals = [None if n is None else b.nodes[n].avals[0] for n in carry_in]
    carry_out = _joints(b, "carry_out", outs, avals, place, trips)
    for first, last in zip(carry_in, carry_out, strict=True):
        if first is not None and last is not None:
            b.nodes[first].inputs.append(Value(b.nodes[first].avals[0], last))
    return carry_out


def _loop(
    b: Builder,
    eqn: Any,
    place: Place,
    carry_in: Nodes,
    carry_out: Nodes,
    token: int,
    start: int,
) -> None:
    carries = tuple(
        (i, o)
        for i, o in zip(carry_in, carry_out, strict=True)
        if i is not None and o is not None
    )
    b.loops.append(Loop(eqn, place, carries, token, range(start, len(b.nodes))))


def _made_by(b: Builder, node: int | None) -> Value | None:
    return None if node is None else Value(b.nodes[node].avals[0], node)


HANDLERS: dict[str, Callable[..., Built]] = {
    **dict.fromkeys(CALLS, call),
    "cond": cond,
    "scan": scan,
    "while": while_,
}
