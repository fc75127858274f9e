"""What differs between the JAX versions that are supported (0.10, 0.11, 0.12).

Every use of a private name stands here, each with the version at which it can go.
The rest of the library sees one JAX.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend import core as jex
from jax.extend import linear_util as lu
from jax.extend import source_info_util
from jax.extend.core import primitives
from jax.interpreters import ad, batching, mlir

# JAX < 0.11 tells open from closed jaxprs; later versions have one class.
CLOSED_IS_OPEN = jex.ClosedJaxpr is jex.Jaxpr


def open_jaxpr(jaxpr: Any) -> Any:
    """Returns the jaxpr itself, without its constants."""
    return jaxpr.jaxpr if hasattr(jaxpr, "jaxpr") else jaxpr


def constants(jaxpr: Any) -> Sequence[Any]:
    """Returns the values of the constants that a jaxpr carries."""
    return getattr(jaxpr, "consts", ())


def constvars(jaxpr: Any) -> Sequence[Any]:
    """Returns the variables that stand for the constants."""
    return open_jaxpr(jaxpr).constvars


def like(original: Any, closed: Any) -> Any:
    """Gives `closed` the kind, open or closed, that `original` has."""
    if CLOSED_IS_OPEN or hasattr(original, "jaxpr"):  # JAX < 0.11: two kinds
        return closed
    if closed.consts:
        raise ValueError("an open jaxpr cannot hold constants")
    return closed.jaxpr


def scan_split(params: dict[str, Any]) -> tuple[int, int]:
    """Returns the number of constants and of carries of a `scan` equation."""
    if "num_carry" in params:  # JAX < 0.11
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def scan_params(
    params: dict[str, Any], jaxpr: Any, consts: int, carries: int
) -> dict[str, Any]:
    """Returns `scan` parameters for a body with so many constants and carries."""
    new = dict(params, jaxpr=jaxpr)
    if "num_carry" in params:  # JAX < 0.11
        return dict(new, num_consts=consts, num_carry=carries)
    # JAX >= 0.11 keeps the arguments' structure in a private tree type.
    trees = importlib.import_module(type(params["ft_in"]).__module__)
    pack = getattr(trees, "pack", None) or trees.FlatTree.pack
    xs = len(jaxpr.in_avals) - consts - carries
    new["ft_in"] = pack(tuple(_nones(trees, n) for n in (consts, carries, xs)))
    ys = len(jaxpr.out_avals) - carries
    new["ft_out"] = pack(tuple(_nones(trees, n) for n in (carries, ys)))
    return new


def _nones(trees: Any, count: int) -> Any:
    """Returns the private tree of `count` leaves, all None."""
    if hasattr(trees, "nones"):
        return trees.nones(count)
    tree = trees.FlatTree.flatten([0] * count)
    return tree.map(lambda _: None)


def scope_elements(name_stack: Any) -> tuple[Any, ...]:
    """Returns the elements of a name stack: scopes and transformations."""
    return name_stack.stack


def is_scope(element: Any) -> bool:
    """Whether an element is a `jax.named_scope`, not a mark of a transformation."""
    return type(element).__name__ == "Scope"


def current_name_stack() -> Any:
    """Returns the name scopes that are entered now."""
    return source_info_util.current_name_stack()


def user_context(eqn: Any, outer: Any) -> Any:
    """Returns a context with the equation's name stack and the user's source line."""
    info = eqn.source_info
    return source_info_util.user_context(
        info.traceback, name_stack=outer + info.name_stack
    )


def frames(eqn: Any) -> list[tuple[Any, int]]:
    """Returns the Python frames that made an equation, inner first.

    Each is a code object and the index of an instruction.
    `jax.extend.source_info_util.summarize` shows the innermost frame outside of JAX
    alone, which is often one of another library.
    """
    traceback = eqn.source_info.traceback
    return [] if traceback is None else list(zip(*traceback.raw_frames(), strict=True))


def frame_line(eqn: Any, code: Any, instruction: int) -> int:
    """Returns the number of the source line of one of an equation's frames."""
    return int(type(eqn.source_info.traceback).code_addr2location(code, instruction)[0])


def with_body(jaxpr: Any, **fields: Any) -> Any:
    """Returns a jaxpr, open or closed as it was, with other equations or variables."""
    body = open_jaxpr(jaxpr)
    new = body.replace(**fields)
    return new if body is jaxpr else jaxpr.replace(jaxpr=new)  # JAX < 0.11: two kinds


def without_dead_code(closed: Any) -> Any:
    """Returns a closed jaxpr without what no result depends on, inside of loops too.

    It takes the same arguments and holds the same effects, as under `jax.jit`.
    """
    from jax._src.interpreters import partial_eval

    body = open_jaxpr(closed)
    read = [True] * len(body.outvars)
    new, _ = partial_eval.dce_jaxpr(body, read, instantiate=True)
    return new if body is closed else closed.replace(jaxpr=new)  # JAX < 0.11


def with_name_stack(eqn: Any, elements: Sequence[Any], params: dict[str, Any]) -> Any:
    """Returns an equation with other name-stack elements and parameters."""
    stack = type(eqn.source_info.name_stack)(tuple(elements))
    info = eqn.source_info.replace(name_stack=stack)
    return eqn.replace(params=params, source_info=info)


def in_scope(eqn: Any, name: str) -> Any:
    """Returns an equation in a scope more."""
    info = eqn.source_info
    info = info.replace(name_stack=info.name_stack.extend(name))
    return eqn.replace(source_info=info)


def evaluate(closed: Any, args: Sequence[Any]) -> list[Any]:
    """Evaluates a closed jaxpr in the current trace; keeps name stacks and lines."""
    body, values = open_jaxpr(closed), [*constants(closed), *args]
    staging = Staging.of(body)
    if staging is None or not all(isinstance(x, jax.Array) for x in values):
        results = jax.core.eval_jaxpr(body, constants(closed), *args)
        return as_arrays(closed, results)
    env = dict(zip([*body.constvars, *body.invars], values, strict=True))
    outer = current_name_stack()
    for eqn in body.eqns:
        reads = [_read(env, v) for v in eqn.invars]
        outs = staging.copy(eqn, reads)
        if outs is None:
            with user_context(eqn, outer), eqn.ctx.manager:
                outs = bind(eqn, reads, eqn.params)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [_read(env, v) for v in body.outvars]


def as_arrays(closed: Any, results: Sequence[Any]) -> list[Any]:
    """Returns a jaxpr's results as arrays; JAX's evaluation leaves numbers literals."""

    def as_array(x: Any, aval: Any) -> Any:
        if isinstance(x, jax.Array) or not hasattr(aval, "dtype"):
            return x
        x = np.asarray(x)
        is_nothing = x.dtype == jax.dtypes.float0  # a gradient of integers
        return x if is_nothing else convert(x, aval.dtype, aval.weak_type)

    return list(map(as_array, results, (v.aval for v in open_jaxpr(closed).outvars)))


def _read(env: dict[Any, Any], atom: Any) -> Any:
    return atom.val if isinstance(atom, jex.Literal) else env[atom]


def allows_rule(effects: Any) -> bool:
    """Whether a function with a `custom_jvp` may have these effects."""
    from jax._src import effects as known

    return not known.custom_derivatives_allowed_effects.filter_not_in(effects)


class Staging:
    """The trace of `jit`, to which finished equations are added as they are.

    To bind an equation anew is to ask for its types, effects and shardings once more,
    which takes five times as long.
    """

    def __init__(self, trace: Any) -> None:
        from jax._src.interpreters import partial_eval

        self._trace = trace
        self._outer = current_name_stack()
        self._stacks: dict[int, tuple[Any, Any]] = {}
        self._tracer = partial_eval.DynamicJaxprTracer

    @classmethod
    def of(cls, jaxpr: Any) -> Staging | None:
        """Returns the staging of a jaxpr's equations in the current trace.

        None if that one computes, or transforms what is bound in it.
        """
        from jax._src import core

        trace = core.trace_ctx.trace
        stages = type(trace).__name__ == "DynamicJaxprTrace" and not trace.requires_low
        return cls(trace) if stages and not open_jaxpr(jaxpr).is_high else None

    def copy(self, eqn: Any, operands: Sequence[Any]) -> list[Any] | None:
        """Adds an equation of the jaxpr to the current trace.

        Args:
          eqn: the equation.
          operands: what it reads; in place of a literal its own number.

        Returns:
          Its results; None if it must be bound anew, because an operand has another
          type, or because binding it does more than to add it.
        """
        if eqn.effects or not _is_plain(eqn.primitive):
            return None
        trace, info, tracers = self._trace, eqn.source_info, []
        if self._outer.stack:
            info = info.replace(name_stack=self._inside(info.name_stack))
        for atom, x in zip(eqn.invars, operands, strict=True):
            aval = atom.aval
            if isinstance(atom, jex.Literal):
                if x is not atom.val:
                    return None
                x = self._tracer(trace, aval, atom, info)
            elif getattr(x, "_trace", None) is not trace:
                return None
            elif x.aval is not aval and x.aval != aval:
                return None
            tracers.append(x)
        if eqn.primitive is _CAST and trace.get_const(tracers[0]) is not None:
            return None
        avals = [v.aval for v in eqn.outvars]
        results: list[Any] = trace.emit_eqn(
            tracers, avals, eqn.primitive, eqn.params, eqn.effects, info, eqn.ctx
        )
        return results

    def _inside(self, stack: Any) -> Any:
        """Returns a name stack inside the scopes that are entered now."""
        if id(stack) not in self._stacks:  # kept with it, or its number is used again
            self._stacks[id(stack)] = stack, self._outer + stack
        return self._stacks[id(stack)][1]


@functools.lru_cache(maxsize=1024)
def _is_plain(primitive: Any) -> bool:
    """Whether to bind a primitive, while `jit` traces, is to add an equation.

    Of operands with equal types the equation is then equal, too. What jaxprs hold of a
    call is inlined while it is traced for the first time, or never.
    """
    if primitive is _CAST:  # of a constant it computes one
        return True
    own = vars(primitive)
    is_bound_otherwise = "bind" in own or "bind_with_trace" in own
    return type(primitive) is jex.Primitive and not is_bound_otherwise


_CAST = primitives.convert_element_type_p


def as_cast(eqn: Any) -> Any:
    """Returns a `rounding` as the cast that it says it is."""
    dtype, primitive = eqn.params["dtype"], eqn.params["into"]
    if primitive is not None:
        return eqn.replace(primitive=primitive, params={"dtype": dtype})
    params = {"new_dtype": dtype, "weak_type": False, "sharding": None}
    return eqn.replace(primitive=primitives.convert_element_type_p, params=params)


def convert(x: Any, dtype: Any, weak_type: bool = False) -> Any:
    """Casts `x` to `dtype`; unlike `lax`, it can also make a weak type."""
    return primitives.convert_element_type_p.bind(
        x, new_dtype=dtype, weak_type=weak_type, sharding=None
    )


def cast_primitive(name: str, fun: Callable[..., Any]) -> jex.Primitive:
    """Makes a primitive of a cast, whose derivative and transpose are plain casts.

    Args:
      name: what a printed jaxpr shows.
      fun: casts `x` to the parameter `dtype`, elementwise; it may have others.
    """
    primitive = jex.Primitive(name)

    def jvp(primals: Any, tangents: Any, *, dtype: Any, **params: Any) -> Any:
        (x,), (t,) = primals, tangents
        out = primitive.bind(x, dtype=dtype, **params)
        if isinstance(t, ad.Zero):
            return out, ad.Zero(jax.typeof(out).to_tangent_aval())
        return out, convert(t, dtype)

    def transpose(ct: Any, x: Any, **_: Any) -> list[Any]:
        aval = x.aval
        zero = isinstance(ct, ad.Zero)
        return [ad.Zero(aval) if zero else convert(ct, aval.dtype)]

    @functools.cache
    def compiled(**params: Any) -> Callable[..., Any]:
        return jax.jit(functools.partial(fun, **params))

    primitive.def_impl(lambda x, **params: compiled(**params)(x))
    primitive.def_abstract_eval(
        lambda x, dtype, **_: x.update(dtype=dtype, weak_type=False)
    )
    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose
    batching.defvectorized(primitive)
    mlir.register_lowering(primitive, mlir.lower_fun(fun, multiple_results=False))
    return primitive


def bind(eqn: Any, values: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Emits the equation's primitive and returns its results as a list."""
    out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(params))
    return list(out) if eqn.primitive.multiple_results else [out]


def scatter_half(
    eqn: Any, values: Sequence[Any], never_meet: bool, sets: bool
) -> list[Any]:
    """Emits a scatter that adds at most one update to an element, on half operands.

    Args:
      eqn: the equation; its jaxpr is of its old dtype.
      values: the operand, the indices and the updates.
      never_meet: whether no two updates meet. Otherwise, of those that a `scatter-add`
        adds to an element, all but one are zeros.
      sets: whether the operand is zeros as well: then it is a `scatter`.
    """
    params = eqn.params
    scatter = lax.scatter if sets else _SCATTERS[eqn.primitive.name]
    operand, indices, updates = values
    out = scatter(
        operand,
        indices,
        updates,
        params["dimension_numbers"],
        indices_are_sorted=params["indices_are_sorted"],
        unique_indices=never_meet or params["unique_indices"],
        mode=params["mode"],
    )
    return [out]


_SCATTERS = {
    "scatter-add": lax.scatter_add,
    "scatter-max": lax.scatter_max,
    "scatter-min": lax.scatter_min,
}
SCATTERS = frozenset(_SCATTERS)


def wrap(fun: Callable[..., Any], like: Any) -> Any:
    """Wraps a flat function as JAX's rules for custom derivatives expect it."""
    return lu.wrap_init(fun, debug_info=like.debug_info)


def flatten_rule(result: Any) -> tuple[list[Any], Any]:
    """Takes apart what a derivative rule returns: a list, or (list, logs)."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], list):
        return list(result[0]), (True, result[1])  # JAX >= 0.11: custom_vjp's bwd
    return list(result), (False, None)


def unflatten_rule(structure: Any, leaves: list[Any]) -> Any:
    """Puts together what `flatten_rule` took apart."""
    with_logs, logs = structure
    return (leaves, logs) if with_logs else leaves


def map_cotangents(fun: Callable[..., Any], result: Any, *rest: Sequence[Any]) -> Any:
    """Maps `fun` over the cotangents that a backward rule returns."""
    leaves, structure = flatten_rule(result)
    new = [fun(*items) for items in zip(leaves, *rest, strict=True)]
    return unflatten_rule(structure, new)


def is_symbolic_zero(x: Any) -> bool:
    """Whether a value is the zero that derivative rules are given for an array."""
    return isinstance(x, SymbolicZero)


def symbolic_zero_like(x: Any, aval: Any) -> Any:
    """Returns a symbolic zero of another dtype."""
    return SymbolicZero(x.aval.update(dtype=aval.dtype))


def is_array(leaf: Any) -> bool:
    """Whether JAX traces a value (an array, a tracer, a reference)."""
    if isinstance(leaf, (bool, int, float, complex)):
        return False
    return isinstance(leaf, jax.Array) or bool(jex.valid_jaxtype(leaf))


def static_arguments(fun: Any) -> tuple[tuple[int, ...], tuple[str, ...]] | None:
    """Returns the static positions and names of a function of `jax.jit` or `nnx.jit`.

    None for other functions.
    """
    info = getattr(getattr(fun, "jitted_fn", fun), "_jit_info", None)
    return None if info is None else (info.static_argnums, info.static_argnames)


def is_concrete(x: Any) -> bool:
    """Whether this process can read an array's numbers."""
    concrete = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    return concrete and x.is_fully_addressable


def placed_like(x: Any, like: Any) -> Any:
    """Returns an array placed as another one, along explicit axes of a mesh."""
    sharding = jax.typeof(like).sharding
    if jax.typeof(x).sharding == sharding:
        return x
    return jax.sharding.reshard(x, sharding)


def is_being_differentiated(x: Any) -> bool:
    """Whether a value is being differentiated, maybe inside of a `vmap`."""
    while type(x).__name__ == "BatchTracer":
        x = x.val
    return type(x).__name__ in ("JVPTracer", "LinearizeTracer")


def staged(x: Any) -> Any:
    """Returns the tracer of `jit` under those of `vmap` and differentiation, or None.

    It belongs to the jaxpr that is being traced: see `maker`.
    """
    while True:
        kind = type(x).__name__
        if kind == "BatchTracer":
            x = x.val
        elif kind in ("JVPTracer", "LinearizeTracer"):
            x = x.primal
        else:
            is_staged = kind == "DynamicJaxprTracer" and hasattr(x, "parent")
            return x if is_staged else None


def is_in_one_jaxpr(x: Any, y: Any) -> bool:
    """Whether two results of `staged` belong to the same jaxpr."""
    return x is not None and y is not None and x._trace is y._trace


def maker(tracer: Any) -> Any:
    """Returns the equation whose result a tracer of `jit` is; None for parameters.

    It has `primitive`, `params` and `source_info`, as an equation of a finished jaxpr.
    """
    return tracer.parent


def reads(eqn: Any) -> Sequence[Any]:
    """Returns the operands of an equation: tracers, where it is being traced."""
    return eqn.in_tracers if hasattr(eqn, "in_tracers") else eqn.invars


def number(operand: Any) -> Any:
    """Returns the value of an operand that is a literal; else None."""
    return getattr(_atom(operand), "val", None)


def result_index(eqn: Any, tracer: Any) -> int:
    """Returns which result of an equation a tracer is."""
    return next(i for i, v in enumerate(eqn.outvars) if v is _atom(tracer))


def _atom(x: Any) -> Any:
    return x.val if isinstance(x, jax.core.Tracer) else x


def vary(x: Any, axes: Sequence[str]) -> Any:
    """Marks an array inside a `shard_map` as different on each device of its axes.

    Args:
      x: the array.
      axes: the mesh axes over which the `shard_map` checks what varies.
    """
    known = jax.typeof(x).mat.varying if axes else ()
    missing = tuple(a for a in axes if a not in known)
    return lax.pcast(x, missing, to="varying") if missing else x


@contextlib.contextmanager
def place_of(eqn: Any, avals: Sequence[Any]) -> Iterator[None]:
    """Traces as where an equation stands.

    A jaxpr notes all of it but this: inside a `shard_map` with `check_vma`, types say
    over which axes of the mesh a value varies.

    Args:
      eqn: the equation.
      avals: types of what is traced.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(eqn.ctx.manager)
        if any(getattr(a, "mat", None) and a.mat.varying for a in avals):
            from jax._src import config, core

            mesh = eqn.ctx.cur_abstract_mesh
            sizes = [(name, mesh.shape[name]) for name in mesh.manual_axes]
            stack.enter_context(core.extend_axis_env_nd(sizes))
            stack.enter_context(config._check_vma(True))
        yield


def is_for(context: Any, devices: tuple[str, ...]) -> bool:
    """Whether a program is lowered for one of some platforms or generations.

    A program for several platforms is for none of them. A generation of TPUs is told by
    the client that compiles; a program that is exported from elsewhere is for none.
    """
    if len(context.platforms) != 1:
        return False
    (platform,) = context.platforms
    kind = _DESCRIBED.value
    version = f"{kind}\n" if kind else getattr(context.backend, "platform_version", "")
    is_tpu = platform == "tpu"
    return any(d == platform or (is_tpu and f"{d}\n" in version) for d in devices)


def is_for_one_device(context: Any) -> bool:
    """Whether a program runs on one device alone."""
    return getattr(context.axis_context, "num_devices", 0) == 1


def holds_whole_arrays(context: Any) -> bool:
    """Whether each device holds whole arrays, as it does inside a `shard_map`.

    In others the partitioner may have split any dimension of an array.
    """
    axes = context.axis_context
    if hasattr(axes, "manual_axes"):
        return set(axes.mesh.axis_names) <= set(axes.manual_axes)
    return is_for_one_device(context)


def default_platform() -> str:
    """Returns the platform that runs by default, by the name that lowering has for it.

    `jax.default_backend()` calls both kinds of GPUs "gpu".
    """
    backend = jax.default_backend()
    if backend != "gpu":
        return backend
    version = jax.devices()[0].client.platform_version
    return "rocm" if "rocm" in version.lower() else "cuda"


def lays_out(sharding: Any) -> bool:
    """Whether a sharding in an equation's parameters says more than the mesh."""
    return sharding is not None and any(axis is not None for axis in sharding.spec)


def is_plain_call(eqn: Any) -> bool:
    """Whether a call asks for no sharding, layout or compiler option."""
    params = eqn.params
    shardings = [*params.get("in_shardings", ()), *params.get("out_shardings", ())]
    layouts = [*params.get("in_layouts", ()), *params.get("out_layouts", ())]
    return (
        all(type(s).__name__ == "UnspecifiedValue" for s in shardings)
        and all(layout is None for layout in layouts)
        and not params.get("compiler_options_kvs")
    )


def is_dropped(var: Any) -> bool:
    """Whether a result has no name, as one that nothing reads."""
    return type(var).__name__ == "DropVar"


def is_reference(aval: Any) -> bool:
    """Whether a type is that of a mutable array reference."""
    return hasattr(aval, "inner_aval")


def dereferenced(x: Any) -> Any:
    """Returns the array that a mutable reference holds now; anything else as it is."""
    return x[...] if is_reference(jax.typeof(x)) else x


def renewed(x: Any) -> Any:
    """Returns a reference of its own to what a reference holds now."""
    return jax.new_ref(x[...]) if is_reference(jax.typeof(x)) else x


def in_own_mesh(x: Any) -> contextlib.AbstractContextManager[Any]:
    """The context of the mesh that an array's type names, if that is another one.

    An equation that takes arrays from one mesh to another, as at the border of
    `jax.sharding.auto_axes`, stands in the context of its results.
    """
    mesh = jax.typeof(x).sharding.mesh if is_array(x) else None
    if mesh is None or mesh.empty or mesh == jax.sharding.get_abstract_mesh():
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh)


def explicit_mesh(arrays: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    """Runs equations on arrays as in a function of them, if their types hold a mesh."""
    meshes = (_explicit(x) for x in arrays)
    mesh = next((m for m in meshes if m is not None), None)
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def unsharded(x: Any) -> Any:
    """Returns an array without a mesh in its type, on the host if it had one."""
    return x if _explicit(x) is None else np.asarray(x)


def _explicit(x: Any) -> Any:
    """Returns the mesh in an array's type, or None."""
    mesh = getattr(getattr(x, "sharding", None), "mesh", None)
    axes = () if mesh is None else mesh.axis_types
    return mesh if jax.sharding.AxisType.Explicit in axes else None


# The `device_kind` that a program is lowered for in a process that does not hold such a
# device; in the keys of JAX's caches, as every user context is.
_DESCRIBED = jax.make_user_context(None)


def lowering_for(kind: str) -> contextlib.AbstractContextManager[None]:
    """Lowers for a device that is only described, by its `device_kind`."""
    return _DESCRIBED(kind)


def lower(traced: Any, platform: str) -> Any:
    """Lowers a `jax.stages.Traced` for a platform that this process may not have."""
    return traced.lower(lowering_platforms=(platform,))


def unplaced(lowered: Any) -> tuple[list[bool], list[bool]]:
    """Returns which parameters and results the partitioner may place as it likes.

    Args:
      lowered: a `jax.stages.Lowered`.
    """
    from jax._src.interpreters import pxla

    args = lowered._lowering.compile_args
    unspecified = pxla.get_prop_to_input_output(
        args["in_shardings"], args["out_shardings"], len(args["ordered_effects"])
    )
    free_parameters, free_results = unspecified
    return list(free_parameters), list(free_results)


def compile_module(
    module: bytes,
    devices: Sequence[Any],
    free: tuple[list[bool], list[bool]],
    options: dict[str, str],
) -> Any:
    """Compiles a StableHLO module for devices that are only described.

    Args:
      module: MLIR bytecode, as `Operation.write_bytecode` writes it.
      devices: of a described topology, in the order of the program's mesh.
      free: what `unplaced` returned.
      options: the compiler's own.

    Returns:
      JAX's executable, which cannot be run here.
    """
    from jax._src import compiler
    from jax._src.interpreters import mlir as jax_mlir
    from jax._src.lib import xla_client
    from jax._src.lib.mlir import ir

    client = devices[0].client
    chosen = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=len(devices),
        device_assignment=np.array(devices, dtype=object).reshape(1, -1),
        env_options_overrides=options,
        backend=client,
    )
    build = chosen.executable_build_options
    build.allow_spmd_sharding_propagation_to_parameters = free[0]
    build.allow_spmd_sharding_propagation_to_output = free[1]
    with jax_mlir.make_ir_context():
        parsed = ir.Module.parse(module)
        return compiler.backend_compile_and_load(
            client, parsed, xla_client.DeviceList(tuple(devices)), chosen, []
        )


def is_started() -> bool:
    """Whether this process has started a backend."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()
