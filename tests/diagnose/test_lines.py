"""Source lines are those of the user, whoever traced a library's function first."""

import inspect

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from jmp_rewrite._source import Caller, Line, Lines


def lines_of(fun, *args):
    """Returns (primitive, depth, line) for each equation, everywhere inside."""
    found, lines = [], Lines()

    def walk(jaxpr, caller, depth):
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            found.append((eqn.primitive.name, depth, lines.of(eqn, caller)))
            for inner in jex.jaxprs_in_params(eqn.params):
                walk(inner, Caller(eqn, caller), depth + 1)

    walk(jax.make_jaxpr(fun)(*args), None, 0)
    return found


def number_of(fun, marker):
    """Returns the number of the line of a function that ends with a marker."""
    lines, first = inspect.getsourcelines(fun)
    (number,) = [i for i, text in enumerate(lines, first) if text.endswith(marker)]
    return number


X = jnp.ones((3, 4))


def two_variances(x):
    a = jnp.var(x, axis=-1)  # one
    b = jnp.var(x, axis=-1)  # two
    return a + b


def test_a_shared_jaxpr_has_the_line_of_each_call():
    lines = [
        line.number for name, _, line in lines_of(two_variances, X) if name == "square"
    ]
    expected = [number_of(two_variances, f"# {n}\n") for n in ("one", "two")]
    assert lines == expected


def test_in_the_backward_pass_too():
    found = lines_of(jax.grad(lambda x: two_variances(x).sum()), X)
    inside = {line.number for _, depth, line in found if depth}
    expected = {number_of(two_variances, f"# {n}\n") for n in ("one", "two")}
    assert inside == expected


def test_equal_code_of_two_files_has_two_names():
    text = "def layer(x):\n    return jnp.sin(x)\n"
    layers = []
    for name in ("first.py", "second.py"):
        space = {"jnp": jnp}
        exec(compile(text, f"/models/{name}", "exec"), space)
        layers.append(space["layer"])
    found = lines_of(lambda x: layers[1](layers[0](x)), X)
    files = [line.file for name, _, line in found if name == "sin"]
    assert files == ["/models/first.py", "/models/second.py"]


@jax.jit
def own(x):
    return jnp.sin(x)  # sine


def body(carry, x):
    return carry + jnp.std(x), jnp.cos(x)  # cosine


def calls_own(x):
    carry, ys = lax.scan(body, jnp.float32(0), x)
    return own(x) + own(ys) + carry


def test_the_users_own_functions_have_their_own_lines():
    found = lines_of(calls_own, X)
    assert {line for name, _, line in found if name == "sin"} == {
        Line(__file__, number_of(own.__wrapped__, "# sine\n"), "own")
    }
    (cosine,) = [line for name, _, line in found if name == "cos"]
    (deviation,) = [line for name, _, line in found if name == "sqrt"]
    assert cosine == deviation == Line(__file__, cosine.number, "body")
    assert cosine.number == number_of(body, "# cosine\n")
