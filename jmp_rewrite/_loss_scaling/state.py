"""The loss-scale state, and where it is in an optimizer's state.

The transformation that keeps this state is `loss_scaling`, in `transformation.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax


class LossScaleState(NamedTuple):
    """The state of `loss_scaling`: arrays only, the same tree for every loss scale.

    Every field is a leaf, so `jax.tree.map`, `lax.scan`, donation and checkpoints keep
    all of it, and a checkpoint may be continued under another `loss_scale`.

    Attributes:
        loss_scale: `f32[]`, by which `scale_loss` multiplies the next gradients.
        finite_steps: `i32[]`, applied steps since the scale last changed (or since it
            was last held at its ceiling).
        skipped_steps: `i32[]`, skipped steps in total.
        consecutive_skips: `i32[]`, steps skipped in a row until now. A few are normal:
            a dynamic scale is probing how large it can be. If it keeps growing, the
            loss itself is Inf or NaN, and no loss scale will help.
        last_step_finite: `bool[]`, whether the last step was applied; True at first.
        inner_state: the state of the wrapped transformation.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from jmp_rewrite import loss_scaling
        >>> tx = loss_scaling(optax.sgd(0.1))
        >>> state = tx.init(jnp.ones(2))
        >>> _, state = tx.update(jnp.array([1.0, jnp.inf]), state)
        >>> print(state.loss_scale, state.skipped_steps, state.last_step_finite)
        16384.0 1 False
    """

    loss_scale: jax.Array
    finite_steps: jax.Array
    skipped_steps: jax.Array
    consecutive_skips: jax.Array
    last_step_finite: jax.Array
    inner_state: Any


def find_states(tree: Any) -> list[tuple[str, LossScaleState]]:
    """Lists every `LossScaleState` in a tree with its path, nested ones too."""
    found: list[tuple[str, LossScaleState]] = []
    leaves = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda x: isinstance(x, LossScaleState)
    )
    for path, leaf in leaves:
        if isinstance(leaf, LossScaleState):
            name = jax.tree_util.keystr(path)
            found.append((name, leaf))
            for inner, state in find_states(leaf.inner_state):
                found.append((f"{name}.inner_state{inner}", state))
    return found


def loss_scale_state(opt_state: Any) -> LossScaleState:
    """Finds the loss-scale state anywhere in a nested or chained optax state.

    Log it to watch the loss scale: a float16 run starts with a few skipped steps, and
    then skips about one in `growth_interval`.

    Args:
        opt_state: an optax state, or any pytree that holds one, such as a Flax
            `TrainState`.

    Returns:
        The one `LossScaleState` in it.

    Raises:
        ValueError: there is none, or there are several; the message says where.

    Example:
        >>> import jax, optax
        >>> from jmp_rewrite import loss_scaling
        >>> tx = optax.chain(loss_scaling(optax.sgd(0.1)), optax.identity())
        >>> opt_state = tx.init({"w": jax.numpy.ones(3)})
        >>> print(loss_scale_state(opt_state).loss_scale)
        32768.0
    """
    found = find_states(opt_state)
    if len(found) == 1:
        return _plain(found[0][1])
    if not found:
        raise ValueError(
            "expected an optimizer state with loss scaling, but found no "
            f"LossScaleState in this {type(opt_state).__name__}: wrap the whole "
            "optimizer, tx = loss_scaling(tx), and take the state from its init; a "
            "checkpoint that was read without a target must be restored into one"
        )
    places = ", ".join(f"opt_state{path}" for path, _ in found)
    raise ValueError(
        f"expected one LossScaleState, found {len(found)}, at {places}: wrap once, "
        "outside, as in loss_scaling(optax.multi_transform(...)); for several losses "
        "with an optimizer each, pass the state of the optimizer that is meant"
    )


def _plain(state: LossScaleState) -> LossScaleState:
    """Takes the arrays out of what holds one each: variables of `flax.nnx.Optimizer`.

    The inner state stays as it is.
    """

    def array(field: Any) -> Any:
        leaves = jax.tree.leaves(field)
        return leaves[0] if len(leaves) == 1 else field

    fields = {name: array(getattr(state, name)) for name in state._fields[:-1]}
    return state._replace(**fields)
