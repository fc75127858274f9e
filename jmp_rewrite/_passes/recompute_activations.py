"""Activations that a backward pass computes again in place of reading them.

The derivative of an activation function needs its argument and its result: a GELU of
`x` keeps `x`, and `erf` or `tanh` of it, because compilers compute neither twice. Where
the argument is stored anyway, the result need not be: the backward pass computes it
again, from the argument behind a barrier, in the kernel that reads it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from jax import lax

from jmp_rewrite import _compat
from jmp_rewrite._passes.by_device import BY_DEVICE, GPU, TPU_V5E, Where
from jmp_rewrite._passes.edit import Body, Editor
from jmp_rewrite._passes.match import (
    FLOAT32,
    depends_on_inputs,
    is_call,
    is_float,
    uses,
)
from jmp_rewrite._passes.program import CASTS, ROUNDING
from jmp_rewrite._rules import ARITHMETIC, COPIES, ELEMENTWISE, EXACT, JOINS, LANES

# What is computed again, and where. Other TPUs multiply faster than a v5e, but do not
# compute `erf` faster; and XLA:TPU computes `tanh` twice by itself.
_BOTH = frozenset({GPU, TPU_V5E})
_FUNCTIONS = {"erf": _BOTH, "erfc": _BOTH, "tanh": frozenset({GPU})}
# What computes element by element, or moves: a kernel goes on behind it.
_FUSED = ELEMENTWISE | ARITHMETIC | COPIES | CASTS | {BY_DEVICE.name}
# No equation: what none makes, or one that holds a jaxpr.
_UNKNOWN = -1
# Results that are made of more stored values than this are not followed: what one
# kernel would read to compute them grows, and so would the time that this takes.
_MANY_VALUES = 4
# What a backward pass makes of an activation is followed no further than this: a
# residual stream leads through all layers.
_MOST_IN_KERNEL = 64


def recompute_activations(editor: Editor) -> None:
    """A backward pass computes an activation again from what is stored.

    On GPUs that saves the write of each such function, and its bytes until it is read.
    On a TPU v5e what is made of it, the operand of the next matrix multiplication, is
    computed again as well, inside that.

    On NVIDIA GPUs and TPUs v5e, in whole train steps.

    Gain: ViT 15 % less memory on an H200, 20 % on a v5e.
    """
    for body in editor.bodies:
        if not body.names.keys().isdisjoint(_FUNCTIONS):
            found = _Found(editor, body)
            if found.devices:
                _Again(editor, body, found).edit()


class _Found:
    """What of a body is computed again, and from what.

    Values are told by their variables, before any casts.

    Attributes:
      devices: value -> the devices on which the backward pass computes it again.
      chain: these, and those that lie between them and what is stored.
      anchors: the stored ones that all this starts from.
    """

    def __init__(self, editor: Editor, body: Body) -> None:
        self._editor, self._body = editor, body
        self._stored: dict[Any, bool] = {}
        self._operands: dict[Any, list[Any]] = {}
        results = (eqn.outvars[0] for _, eqn in body.find(*_FUNCTIONS))
        functions = {v for v in results if self.is_stored(v)}
        made_of = self._made_of(functions) if functions else {}
        kept = self._kept(made_of, functions)
        again = [v for v, made in made_of.items() if made and made <= kept]
        self.devices = self._devices(again, functions, frozenset())
        if written := self._written_again(functions):
            self.devices = self._devices(again, functions, written)
        self.chain: set[Any] = set()
        stack = list(self.devices)
        while stack:
            var = stack.pop()
            if var not in self.chain:
                self.chain.add(var)
                between = set(self._large(var)) - made_of[var]
                stack += [s for s in between if s in made_of]
        self.anchors = frozenset().union(*(made_of[v] for v in self.devices))

    def _devices(
        self, again: Sequence[Any], functions: set[Any], written: frozenset[Any]
    ) -> dict[Any, frozenset[str]]:
        """Returns where values are computed again.

        Args:
          again: those that can be, in the order of their equations.
          functions: the activation functions among them.
          written: those that a GPU would write when it computes them again.
        """
        devices: dict[Any, frozenset[str]] = {}
        for var in again:
            if var in functions:
                on = _FUNCTIONS[self._body.made_by(var).primitive.name]
                on -= {GPU} if var in written else set()
            else:
                found = [devices[s] for s in self._large(var) if s in devices]
                on = found[0].intersection(*found[1:]) if found else frozenset()
                on -= {GPU} if self.is_stored(var) else set()  # there, for a product
            if on:
                devices[var] = on
        return devices

    def _written_again(self, functions: set[Any]) -> frozenset[Any]:
        """Returns the functions that a GPU computes again for more than one kernel.

        It does not compute them in each, but writes them, in float32.
        """
        made_of: dict[Any, set[Any]] = {}  # value -> the functions that it is made of
        readers: dict[Any, set[int]] = {}
        for var, on in self.devices.items():
            made = (made_of[s] for s in self._large(var) if s in made_of)
            made_of[var] = {var} if var in functions else set().union(*made)
            if GPU in on:
                for at, _, read in late_reads(self._editor, self._body, var):
                    if read.aval.dtype == FLOAT32:
                        for function in made_of[var]:
                            readers.setdefault(function, set()).add(at)
        return frozenset(f for f, at in readers.items() if not _in_one(self._body, at))

    def is_stored(self, var: Any) -> bool:
        """Whether a value is half: as it is computed, or rounded for all readers."""
        if var not in self._stored:
            reads = self._body.reads(var)
            self._stored[var] = var.aval.dtype == self._editor.half or (
                bool(reads)
                and all(
                    i >= 0
                    and self._body.eqns[i].primitive.name in (ROUNDING, "by_device")
                    for i, _ in reads
                )
            )
        return self._stored[var]

    def _large(self, var: Any) -> list[Any]:
        """Returns the operands that are not small beside a result, before casts.

        None stands for what no equation of the body makes, or one that holds a jaxpr.
        """
        if var not in self._operands:
            self._operands[var] = self._large_operands(var)
        return self._operands[var]

    def _large_operands(self, var: Any) -> list[Any]:
        size = math.prod(var.aval.shape)
        found = []
        for atom in self._body.made_by(var).invars:
            if is_float(atom) and depends_on_inputs(self._body, atom):
                if 2 * math.prod(atom.aval.shape) >= size:
                    found.append(self.source(atom))
        return found

    def source(self, atom: Any) -> Any:
        """Returns a value before casts; None if it is not known how it is stored."""
        var, index = uncast(self._body, atom)
        if index >= 0:
            return var
        is_given = var in self._body.parameter and var.aval.dtype == self._editor.half
        return var if is_given else None

    def _made_of(self, functions: set[Any]) -> dict[Any, frozenset[Any]]:
        """Returns of which stored values each of a forward pass is made."""
        body, editor = self._body, self._editor
        made_of: dict[Any, frozenset[Any]] = {}
        follows: set[Any] = set()  # what is made of one of the functions
        for index, eqn in enumerate(body.eqns[: self._last_backward()]):
            var = eqn.outvars[0] if len(eqn.outvars) == 1 else None
            if eqn.primitive.name not in ARITHMETIC and var not in functions:
                continue
            if _is_cast(eqn) or var is None or not is_float(var):
                continue
            marks = editor.marks(body, index)
            if any(m.rewritten or (m.backward and not m.recomputed) for m in marks):
                continue
            found: set[Any] = set()
            large = self._large(var)
            for source in large:
                if source is None:
                    break
                exact = body.made_by(source, *EXACT) is not None
                is_stored = self.is_stored(source)
                if source in made_of and (source in follows or exact or not is_stored):
                    found |= made_of[source]
                elif is_stored:
                    found.add(source)
                else:
                    break
            else:
                if len(found) <= _MANY_VALUES:
                    made_of[var] = frozenset(found)
                    if var in functions or follows.intersection(large):
                        follows.add(var)
        return made_of

    def _last_backward(self) -> int:
        """Returns the last equation that is, or may hold, one of a backward pass."""
        body = self._body
        for index in reversed(range(len(body.eqns))):
            if index in body.held or self._editor.is_backward(body, index):
                return index
        return 0

    def _kept(
        self, made_of: dict[Any, frozenset[Any]], functions: set[Any]
    ) -> set[Any]:
        """Returns the stored values that a backward pass reads, whatever else is."""
        direct: dict[Any, frozenset[Any]] = {}
        for var, stored in made_of.items():
            if var not in functions and not any(
                s in functions or (s in made_of and s not in direct)
                for s in self._large(var)
            ):
                direct[var] = stored
        candidates = {*direct, *frozenset().union(*made_of.values())}
        read = {v for v in candidates if self._is_read_late(v)}
        return read.union(*(direct[v] for v in read if v in direct))

    def _is_read_late(self, var: Any) -> bool:
        left = [(self._body, var)]
        while left:
            for body, at, _ in uses(*left.pop()):
                if at < 0:
                    continue
                if _is_cast(body.eqns[at]):
                    left.append((body, body.eqns[at].outvars[0]))
                elif self._editor.is_backward(body, at):
                    return True
        return False


def _in_one(body: Body, readers: set[int]) -> bool:
    """Whether one kernel may hold all these, with what is computed of them in it.

    What is put beside the result of a later kernel is computed there, as the cotangent
    of a gate is, beside that of its argument behind a convolution.
    """
    left, seen = list(readers), set(readers)
    ends, operands = set[int](), list[Any]()
    while left and len(seen) < _MOST_IN_KERNEL:
        eqn = body.eqns[left.pop(0)]
        for var in eqn.outvars:
            for at, _ in body.reads(var):
                if at < 0 or at in seen:
                    continue
                seen.add(at)
                name = body.eqns[at].primitive.name
                if name in _FUSED or is_call(body.eqns[at]):
                    left.append(at)
                    if name in JOINS or body.made_by(var, "pad") is not None:
                        operands += body.eqns[at].invars
                else:
                    ends.add(at)
    return not ends or not _follows(body, operands, ends)


def _follows(body: Body, values: Iterable[Any], ends: set[int]) -> bool:
    """Whether one of these values is computed of the results of one of these."""
    first = min(ends)
    left, seen = [body.maker.get(v, -1) for v in values if not hasattr(v, "val")], set()
    while left:
        at = left.pop()
        if at in ends:
            return True
        if at > first and at not in seen:
            seen.add(at)
            operands = (v for v in body.eqns[at].invars if not hasattr(v, "val"))
            left += [body.maker.get(v, -1) for v in operands]
    return False


def _is_cast(eqn: Any) -> bool:
    """Whether an equation rounds to half, widens to float32, or chooses by device."""
    is_named = eqn.primitive.name in CASTS or eqn.primitive is BY_DEVICE
    return is_named and all(map(is_float, (eqn.invars[0], eqn.outvars[0])))


def origin_of(body: Body, atom: Any) -> int:
    """Returns the equation that makes a value, before casts; -1 if it is none alone."""
    return uncast(body, atom)[1]


def uncast(body: Body, atom: Any) -> tuple[Any, int]:
    """Returns a value before casts, None for a number, and the equation that makes it.

    The equation is `_UNKNOWN` if it is none of the body alone.
    """
    while not hasattr(atom, "val"):
        index = body.maker.get(atom, -1)
        if index < 0 or index in body.held:
            return atom, _UNKNOWN
        eqn = body.eqns[index]
        if not _is_cast(eqn):
            return atom, index
        atom = eqn.invars[eqn.outvars.index(atom)]
    return None, _UNKNOWN


def late_reads(editor: Editor, body: Body, var: Any) -> list[tuple[int, int, Any]]:
    """Returns where a backward pass reads a value: (equation, position, variable).

    Of calls and loops nothing is returned: they are given what is stored.
    """
    found, left = [], [var]
    while left:
        var = left.pop()
        for at, position in body.reads(var):
            if at < 0 or at in body.held:
                continue
            eqn = body.eqns[at]
            if _is_cast(eqn):
                if position < len(eqn.outvars):
                    left.append(eqn.outvars[position])
            elif eqn.primitive.name not in LANES and editor.is_backward(body, at):
                found.append((at, position, var))
    return sorted(found, key=lambda read: read[:2])


def half_of(body: Body, var: Any, half: Any) -> Any:
    """Returns the half copy of a value; None if there is none."""
    if var.aval.dtype == half:
        return var
    for at, _ in body.reads(var):
        eqn = body.eqns[at]
        if (
            at >= 0
            and eqn.primitive.name in CASTS
            and eqn.outvars[0].aval.dtype == half
        ):
            return eqn.outvars[0]
    return None


class _Again:
    """Computes again what was found, where it is read first."""

    def __init__(self, editor: Editor, body: Body, found: _Found) -> None:
        self._editor, self._body, self._found = editor, body, found
        self._full: dict[Any, Any] = {}
        self._apart: dict[Any, Any] = {}
        self._read: dict[tuple[Any, bool], Any] = {}

    def edit(self) -> None:
        """Makes the backward pass read what it computes again."""
        reads = [
            (at, position, read, var)
            for var in self._found.devices
            for at, position, read in late_reads(self._editor, self._body, var)
        ]
        for at, position, read, var in sorted(reads, key=lambda found: found[:2]):
            new = self._chosen(at, read, var)
            if new is not None:
                self._editor.read(self._body, at, position, new)

    def _chosen(self, at: int, read: Any, var: Any) -> Any:
        """Returns a reader's operand: on some devices the recomputed one."""
        in_half = read.aval.dtype == self._editor.half
        on = self._found.devices[var] - ({GPU} if in_half else set())
        if not on or self._editor.was_here(self._body, read):
            return None
        if (var, in_half) not in self._read:
            again = self._computed(at, var)
            if in_half:
                again = self._rounded(at, again, read)
            where = Where(tuple(d for d in (GPU, TPU_V5E) if d in on))
            (new,) = self._editor.choose(
                self._body, at, [read], [again], {where: _second}
            )
            self._read[var, in_half] = new
        return self._read[var, in_half]

    def _rounded(self, at: int, again: Any, read: Any) -> Any:
        cast = self._body.made_by(read, *CASTS)
        how = () if cast is None else (cast.primitive, *cast.params.items())
        (half,) = self._editor.insert(
            self._body, at, _cast_as, again, how=how, dtype=read.aval.dtype
        )
        return half

    def _computed(self, at: int, var: Any) -> Any:
        """Computes a value again, in float32, in front of an equation."""
        if var not in self._full:
            eqn = self._body.made_by(var)
            operands = [self._before(at, v) for v in eqn.invars]
            (self._full[var],) = self._editor.insert(
                self._body,
                at,
                _in_float32,
                *operands,
                primitive=eqn.primitive,
                params=tuple(eqn.params.items()),
                half=self._editor.half,
            )
        return self._full[var]

    def _before(self, at: int, atom: Any) -> Any:
        """Returns an operand of what is computed again."""
        if hasattr(atom, "val") or not is_float(atom):
            return atom
        source = self._found.source(atom)
        if source in self._found.anchors:
            if source not in self._apart:
                half = half_of(self._body, source, self._editor.half)
                (self._apart[source],) = self._editor.insert(
                    self._body, at, _from_stored, source if half is None else half
                )
            return self._apart[source]
        return self._computed(at, source) if source in self._found.chain else atom


def _in_float32(
    *operands: Any, primitive: Any, params: Sequence[tuple[str, Any]], half: Any
) -> Any:
    values = [_compat.convert(x, FLOAT32) if x.dtype == half else x for x in operands]
    own = {k: FLOAT32 if k == "new_dtype" else v for k, v in params}
    return [primitive.bind(*values, **own)]


def _cast_as(x: Any, *, how: Sequence[Any], dtype: Any) -> Any:
    if not how:
        return [_compat.convert(x, dtype)]
    primitive, *params = how
    return [primitive.bind(x, **dict(params))]


def _from_stored(x: Any) -> Any:
    return [_compat.convert(lax.optimization_barrier(x), FLOAT32)]


def _second(stored: Any, again: Any) -> Any:
    return [again]
