"""Faults of the kinds that half precision makes, planted one at a time.

    python tests/diagnose/planted_faults.py [--json OUT]

For each fault: the line that was planted (it ends in `# planted`), the first line that
`jmp_rewrite.diagnose` names, the policy that it finds, and the error of the results
before and after. Most of what goes wrong by hand does not go wrong under a default
policy; then the program asks for it, by `scopes`, by `rules` (the error without them is
given too), or by casts of its own ("by hand"), which no policy takes back. Of what a
`custom_vjp`'s backward rule does JAX knows only the line of the call.

The model is a residual network of three blocks with an attention, trained with Adam:
each fault is planted into one of its parts, and the whole step is diagnosed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import json
import pathlib
import platform
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmp_rewrite as jmpr

cross_entropy = optax.softmax_cross_entropy_with_integer_labels
WIDTH, BATCH, LENGTH, CLASSES = 64, 4, 16, 10
Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault and how it is planted.

    Attributes:
      name: what goes wrong.
      parts: the parts of the model that are replaced, by name.
      dtypes: the policies under which it happens.
      rules: what a policy has to say for it to happen.
      scopes: the same.
    """

    name: str
    parts: dict[str, Callable[..., Any]]
    dtypes: tuple[str, ...]
    rules: dict[str, str] = dataclasses.field(default_factory=dict)
    scopes: dict[str, str] = dataclasses.field(default_factory=dict)

    def bound(self, policy: jmpr.Policy) -> dict[str, Callable[..., Any]]:
        """Returns the parts; what is written by hand takes the policy's dtype."""
        half = policy.compute_dtype.type
        return {
            name: functools.partial(part, half=half)
            if "half" in inspect.signature(part).parameters
            else part
            for name, part in self.parts.items()
        }

    @property
    def line(self) -> str:
        """The planted line, as file:number."""
        for part in self.parts.values():
            lines, first = inspect.getsourcelines(part)
            for number, text in enumerate(lines, first):
                if text.rstrip().endswith("# planted"):
                    file = pathlib.Path(inspect.getsourcefile(part) or "")
                    return f"{file.name}:{number}"
        raise ValueError(f"no line of {self.name!r} is marked as planted")


# ---- the model: each part can be replaced


def attention(p: Params, x: Any) -> Any:
    q, k, v = (jnp.einsum("btd,de->bte", x, p[n]) for n in ("q", "k", "v"))
    logits = jnp.einsum("bte,bse->bts", q, k) / np.sqrt(WIDTH).astype(np.float32)
    causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    logits = jnp.where(causal[None], logits, jnp.float32(-1e9))
    return jnp.einsum("bts,bse->bte", jax.nn.softmax(logits), v)


def norm(p: Params, x: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    deviation = jnp.sqrt(jnp.square(x - mean).mean(-1, keepdims=True) + 1e-6)
    return (x - mean) / deviation * p["scale"]


def mlp(p: Params, x: Any) -> Any:
    return jax.nn.gelu(x @ p["up"]) @ p["down"]


def pool(p: Params, x: Any) -> Any:
    return x.mean(1)


def loss(logits: Any, y: Any) -> Any:
    return cross_entropy(logits, y).mean()


MODEL = {
    "attention": attention,
    "norm": norm,
    "mlp": mlp,
    "pool": pool,
    "loss": loss,
}


def init(seed: int = 0) -> Params:
    def dense(key: Any, *shape: int) -> Any:
        return jax.random.normal(key, shape) / np.sqrt(shape[0]).astype(np.float32)

    keys = iter(jax.random.split(jax.random.key(seed), 32))
    blocks = [
        {
            "attention": {n: dense(next(keys), WIDTH, WIDTH) for n in ("q", "k", "v")},
            "norm": {"scale": jnp.ones(WIDTH)},
            "mlp": {
                "up": dense(next(keys), WIDTH, 2 * WIDTH),
                "down": dense(next(keys), 2 * WIDTH, WIDTH),
            },
        }
        for _ in range(3)
    ]
    return {"blocks": blocks, "head": dense(next(keys), WIDTH, CLASSES)}


def make_step(parts: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Returns a train step of the model with some parts replaced in its block 1."""
    optimizer = optax.adam(1e-3)
    faulty = {**MODEL, **parts}

    def loss_fn(params: Params, x: Any, y: Any) -> Any:
        for number, p in enumerate(params["blocks"]):
            part = faulty if number == 1 else MODEL
            with jax.named_scope(f"block_{number}"):
                with jax.named_scope("attention"):
                    x = x + part["attention"](p["attention"], x)
                with jax.named_scope("norm"):
                    h = part["norm"](p["norm"], x)
                with jax.named_scope("mlp"):
                    x = x + part["mlp"](p["mlp"], h)
        with jax.named_scope("pool"):
            x = faulty["pool"](params, x)
        with jax.named_scope("head"):
            logits = x @ params["head"]
        with jax.named_scope("loss"):
            return faulty["loss"](logits, y)

    def step(params: Params, state: Any, x: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def arguments(seed: int = 0) -> tuple[Any, ...]:
    params = init(seed)
    x = jax.random.normal(jax.random.key(seed + 1), (BATCH, LENGTH, WIDTH))
    return params, optax.adam(1e-3).init(params), x, jnp.arange(BATCH) % CLASSES


# ---- the faults


def squared_mlp(p: Params, x: Any) -> Any:
    h = x @ p["up"]
    h = jnp.square(100 * h)  # planted
    return 1e-5 * (h @ p["down"])


def summed_mlp(p: Params, x: Any, half: Any) -> Any:
    h = jnp.abs(x @ p["up"]).astype(half)
    total = 4 + h
    for _ in range(256):
        total = total + half(0.005)  # planted
    return 0.1 * (total.astype(jnp.float32) @ p["down"])


def unit_mlp(p: Params, x: Any, half: Any) -> Any:
    h = jax.nn.relu(x @ p["up"]).astype(half)
    epsilon = jnp.full_like(x, 1e-8, shape=h.shape).astype(half)  # planted
    return (h / (h + epsilon)).astype(jnp.float32) @ p["down"]


def log_mlp(p: Params, x: Any) -> Any:
    h = x @ p["up"]
    room = 1.0005 - jnp.tanh(9 * h)  # planted
    return 0.1 * jnp.log(room) @ p["down"]


def masked_attention(p: Params, x: Any, half: Any) -> Any:
    q, k, v = (jnp.einsum("btd,de->bte", x, p[n]) for n in ("q", "k", "v"))
    logits = jnp.einsum("bte,bse->bts", q, k) / np.sqrt(WIDTH).astype(np.float32)
    is_text = jnp.arange(BATCH)[:, None, None] > 0
    logits = jnp.where(is_text, logits, logits - 6e4).astype(half)
    logits = jnp.where(is_text, logits, logits - half(6e4))  # planted
    weights = jax.nn.softmax(logits.astype(jnp.float32))
    return jnp.einsum("bts,bse->bte", weights, v)


def sharp_attention(p: Params, x: Any) -> Any:
    q, k, v = (jnp.einsum("btd,de->bte", x, p[n]) for n in ("q", "k", "v"))
    logits = jnp.einsum("bte,bse->bts", 100 * q, k)
    weights = jax.nn.softmax(logits)  # planted
    return jnp.einsum("bts,bse->bte", weights, v)


def plain_softmax(p: Params, x: Any) -> Any:
    q, k, v = (jnp.einsum("btd,de->bte", x, p[n]) for n in ("q", "k", "v"))
    logits = jnp.einsum("bte,bse->bts", q, k)
    weights = jnp.exp(logits / 4)  # planted
    weights = weights / weights.sum(-1, keepdims=True)
    return jnp.einsum("bts,bse->bte", weights, v)


def tiny_loss(logits: Any, y: Any) -> Any:
    return 1e-7 * cross_entropy(logits, y).mean()  # planted


@jax.custom_vjp
def scaled_product(x: Any, w: Any) -> Any:
    return x @ w


def _scaled_fwd(x: Any, w: Any) -> Any:
    return x @ w, (x, w)


def _scaled_bwd(saved: Any, g: Any) -> Any:
    x, w = saved
    g = 1e9 * g
    return 1e-9 * (g @ w.T), 1e-9 * jnp.einsum("btd,bte->de", x, g)


scaled_product.defvjp(_scaled_fwd, _scaled_bwd)


def scaled_mlp(p: Params, x: Any) -> Any:
    h = scaled_product(x, p["up"])  # planted
    return jax.nn.gelu(h) @ p["down"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def compressed(x: Any, half: Any) -> Any:
    return jnp.tanh(x)


def _compressed_fwd(x: Any, half: Any) -> Any:
    return jnp.tanh(x), jnp.tanh(x)


def _compressed_bwd(half: Any, y: Any, g: Any) -> Any:
    tiny = np.float32(1e-6)  # times a gradient it is beyond float16
    g = (tiny * g).astype(half).astype(jnp.float32)
    return ((1 - y * y) * (g / tiny),)


compressed.defvjp(_compressed_fwd, _compressed_bwd)


def compressed_mlp(p: Params, x: Any, half: Any) -> Any:
    h = compressed(x @ p["up"], half)  # planted
    return h @ p["down"]


BOTH = ("mixed_float16", "mixed_bfloat16")

FAULTS = [
    Fault("a square overflows", {"mlp": squared_mlp}, BOTH[:1]),
    Fault("a sum by hand loses small terms", {"mlp": summed_mlp}, BOTH),
    Fault("an epsilon by hand vanishes", {"mlp": unit_mlp}, BOTH[:1]),
    Fault("a margin vanishes", {"mlp": log_mlp}, BOTH, scopes={"block_1/mlp": "half"}),
    Fault(
        "two masks by hand add up to infinity",
        {"attention": masked_attention},
        BOTH[:1],
    ),
    Fault("a softmax of large logits", {"attention": sharp_attention}, BOTH),
    Fault(
        "exp made half by a rule",
        {"attention": plain_softmax},
        BOTH[:1],
        rules={"exp": "infer", "reduce_sum": "infer"},
    ),
    Fault("gradients underflow", {"loss": tiny_loss}, BOTH[:1]),
    Fault("a custom_vjp overflows", {"mlp": scaled_mlp}, BOTH[:1]),
    Fault("a custom_vjp casts by hand", {"mlp": compressed_mlp}, BOTH[:1]),
]


def run(fault: Fault, name: str, seed: int = 0) -> dict[str, Any]:
    """Plants a fault, diagnoses it, and looks for a policy."""
    policy = jmpr.Policy(name, rules=fault.rules, scopes=fault.scopes)
    step, args = make_step(fault.bound(policy)), arguments(seed)
    start = time.perf_counter()
    diagnosis = jmpr.diagnose(step, policy)(*args)
    seconds = time.perf_counter() - start
    found = diagnosis.policy
    default = None
    if fault.rules or fault.scopes:
        default = jmpr.diagnose(step, name)(*args).error
    first = diagnosis.worst
    return {
        "fault": fault.name,
        "policy": repr(policy),
        "planted": fault.line,
        "named": str(first.line) if first else "",
        "why": diagnosis.why(first) if first else "",
        "error": diagnosis.error,
        "error without provoking": default,
        "found": None if found is None else repr(found),
        "error after": None if found is None else diagnosis.policy_error,
        "runs": len(diagnosis.tried),
        "seconds": round(seconds, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the model and the data")
    parser.add_argument("--only", default="", help="faults whose name has this in it")
    parser.add_argument("--json", help="where to write the table")
    options = parser.parse_args()
    rows = []
    for fault in FAULTS:
        for name in fault.dtypes:
            if options.only not in fault.name:
                continue
            row = run(fault, name, options.seed)
            rows.append(row)
            verdict = "ok" if row["named"] == row["planted"] else "WRONG"
            after = "-" if row["found"] is None else f"{row['error after']:.2g}"
            print(f"{verdict:6s}{row['fault']}, {row['policy']}")
            print(f"      planted {row['planted']}, named {row['named']}: {row['why']}")
            print(f"      error {row['error']:.2g} -> {after}: {row['found']}")
            if row["error without provoking"] is not None:
                print(f"      without provoking {row['error without provoking']:.2g}")
    right = sum(row["named"] == row["planted"] for row in rows)
    print(f"{right} of {len(rows)} planted lines are named first")
    if options.json:
        about = {"jax": jax.__version__, "machine": platform.machine()}
        pathlib.Path(options.json).write_text(
            json.dumps({**about, "seed": options.seed, "faults": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
