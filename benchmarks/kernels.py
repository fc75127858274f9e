"""Whether kernels get half operands: attention kernels compiled for their devices.

    PYTHONPATH=. python benchmarks/kernels.py

A float32 attention layer calls a kernel that JAX cannot look into, decorated with
`half_precision`: flash and splash attention of JAX for TPUs, cuDNN's for NVIDIA GPUs
(`pip install nvidia-cudnn-cu13`; no driver). Printed for the forward pass and for a
train step in bfloat16 (`mixed_precision`): what each kernel returns and reads.
Row sums and maxima are float32 by the kernels' own design.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import devices  # it chooses the backend, so it comes before jax
import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)

from jmp_rewrite import half_precision, mixed_precision

BATCH, LENGTH, HEADS, WIDTH = 4, 256, 4, 128
CALL = re.compile(r'%(\S+) = (.*?) custom-call\(.*custom_call_target="([^"]+)"(.*)')
KERNELS = ("tpu_custom_call", "__cudnn")


def splash(q: Any, k: Any, v: Any) -> Any:
    causal = splash_attention_mask.CausalMask((LENGTH, LENGTH))
    mask = splash_attention_mask.MultiHeadMask([causal] * HEADS)
    kernel = splash_attention_kernel.make_splash_mha(
        mask, head_shards=1, q_seq_shards=1
    )
    return jax.vmap(kernel)(q, k, v)


def cudnn(q: Any, k: Any, v: Any) -> Any:
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    attend = functools.partial(
        jax.nn.dot_product_attention, implementation="cudnn", is_causal=True
    )
    return attend(q, k, v).swapaxes(1, 2)


ATTENTION = {
    "flash": (functools.partial(flash_attention, causal=True), ("v5e", "v6e")),
    "splash": (splash, ("v5e", "v6e")),
    "cudnn": (cudnn, ("h200",)),
}


def layer(attend: Callable[..., Any]) -> Callable[..., Any]:
    def forward(weights: Any, x: Any) -> Any:
        def heads(name: str) -> Any:
            return (x @ weights[name]).reshape(*x.shape[:2], HEADS, WIDTH)

        q, k, v = (heads(name).swapaxes(1, 2) for name in "qkv")
        mixed = half_precision(attend)(q, k, v).swapaxes(1, 2)
        return mixed.reshape(x.shape) @ weights["o"]

    return forward


def step_of(forward: Callable[..., Any]) -> Callable[..., Any]:
    def step(weights: Any, x: Any) -> Any:
        grads = jax.grad(lambda w: jnp.square(forward(w, x)).mean())(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)

    return step


def calls(text: str) -> Iterator[str]:
    """Yields what each kernel returns, and reads where that is said."""
    for line in text.splitlines():
        found = CALL.search(line)
        if found and found[3].startswith(KERNELS):
            read = re.search(r"operand_layout_constraints=\{(.*?)\}, \w+=", found[4])
            types = [found[2], *([read[1]] if read else [])]
            yield (
                found[1]
                + ": "
                + " of ".join(re.sub(r"\{[^}]*\}", "", t) for t in types)
            )


def main() -> None:
    size = HEADS * WIDTH
    weights = {n: jax.ShapeDtypeStruct((size, size), jnp.float32) for n in "qkvo"}
    x = jax.ShapeDtypeStruct((BATCH, LENGTH, size), jnp.float32)
    for name, (attend, targets) in ATTENTION.items():
        forward = layer(attend)
        for target in targets:
            for what, fun in {"forward": forward, "step": step_of(forward)}.items():
                half = mixed_precision(fun, "mixed_bfloat16")
                found, _ = devices.compiled(target, half, (weights, x))
                for call in calls(found.text):
                    print(f"{name:7}{target:6}{what:9}{call}", flush=True)


if __name__ == "__main__":
    main()
