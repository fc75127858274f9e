"""Train steps that the package was not developed on, by the real compilers.

    PYTHONPATH=. python benchmarks/zoo2.py [--models NAME ...] [--targets v5e h200]
        [--modes by_hand ours] [--passes SPEC] [--json FILE]

As `compare.py`, with programs in place of modules: each takes the dtype that a user
would write on every layer by hand, float32 for the model that is decorated. The first
half is what the rules were made on: all but `dispatch`, `graph_network` and
`diffusion_transformer` was written before any figure was seen. The second half was
written after the rules stood. No rule was made on what is unseen, and none may be. Of
what was written since, `codec` and `pixel_cnn` showed two rules that were missing, and
of the last twelve `style_gan`, `continuous` and `ladder` showed four.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Any

import devices  # it chooses the backend, so it comes before jax
import jax.numpy as jnp
import modes
import results
import zoo2_language
import zoo2_libraries
import zoo2_science
import zoo2_second
import zoo2_third
import zoo2_unseen
import zoo2_unseen_eighth
import zoo2_unseen_eleventh
import zoo2_unseen_fifth
import zoo2_unseen_fourth
import zoo2_unseen_ninth
import zoo2_unseen_second
import zoo2_unseen_seventh
import zoo2_unseen_sixth
import zoo2_unseen_tenth
import zoo2_unseen_third
import zoo2_unseen_thirteenth
import zoo2_unseen_twelfth
import zoo2_vision
from compare import print_rows

import jmp_rewrite as jmpr

FIRST = {
    "decoder": zoo2_language.decoder,
    "experts": zoo2_language.experts,
    "dispatch": zoo2_language.dispatch,
    "state_space": zoo2_language.state_space,
    "gan": zoo2_vision.Gan,
    "byol": zoo2_vision.byol,
    "diffusion_transformer": zoo2_vision.diffusion_transformer,
    "graph_network": zoo2_science.graph_network,
    "potential": zoo2_science.potential,
}
SECOND = {
    "encoder_decoder": zoo2_second.encoder_decoder,
    "distillation": zoo2_second.distillation,
    "diffusion": zoo2_second.diffusion,
    "double_dqn": zoo2_second.double_dqn,
    "scanned_decoder": zoo2_third.scanned_decoder,
    "linear_attention": zoo2_third.linear_attention,
    "low_rank": zoo2_third.LowRank,
    "multi_task": zoo2_third.multi_task,
    "muon": zoo2_third.muon,
    "sharpness": zoo2_third.Sharpness,
    "contrastive": zoo2_libraries.contrastive,
    "flow": zoo2_libraries.flow,
    "recurrent": zoo2_libraries.recurrent,
    "proximal": zoo2_libraries.Proximal,
    "segmentation": zoo2_libraries.segmentation,
}
UNSEEN = {
    "masked_autoencoder": zoo2_unseen.masked_autoencoder,
    "gradient_penalty": zoo2_unseen.gradient_penalty,
    "quantized": zoo2_unseen.quantized,
    "radiance_field": zoo2_unseen.radiance_field,
    "conformer": zoo2_unseen.conformer,
    "perceiver": zoo2_unseen.perceiver,
    "world_model": zoo2_unseen_second.world_model,
    "recommender": zoo2_unseen_second.recommender,
    "points": zoo2_unseen_second.points,
}
UNSEEN_SINCE = {
    "densenet": zoo2_unseen_third.densenet,
    "codec": zoo2_unseen_third.codec,
    "dino": zoo2_unseen_third.DinoStep,
    "point_transformer": zoo2_unseen_third.point_transformer,
    "graph_attention": zoo2_unseen_third.graph_attention,
    "tabular": zoo2_unseen_fourth.tabular,
    "muzero": zoo2_unseen_fourth.muzero,
    "latent_attention": zoo2_unseen_fourth.latent_attention,
    "deberta": zoo2_unseen_fourth.deberta,
    "state_duality": zoo2_unseen_fourth.state_duality,
    "wav2vec": zoo2_unseen_fourth.wav2vec,
    "conv_lstm": zoo2_unseen_fourth.conv_lstm,
    "pixel_cnn": zoo2_unseen_fourth.pixel_cnn,
}
# Written last, of families that all of these lack.
UNSEEN_LAST = {
    "hyena": zoo2_unseen_fifth.hyena,
    "volumes": zoo2_unseen_fifth.volumes,
    "delta_rule": zoo2_unseen_fifth.delta_rule,
    "detector": zoo2_unseen_fifth.detector,
    "structure": zoo2_unseen_fifth.structure,
    "preferences": zoo2_unseen_fifth.preferences,
    "controlled": zoo2_unseen_sixth.controlled,
    "style_gan": zoo2_unseen_sixth.StyleGan,
    "synthesis": zoo2_unseen_sixth.synthesis,
    "ladder": zoo2_unseen_sixth.ladder,
    "integers": zoo2_unseen_sixth.integers,
    "continuous": zoo2_unseen_sixth.continuous,
}
UNSEEN_SEVENTH = {
    "graphormer": zoo2_unseen_seventh.graphormer,
    "transducer": zoo2_unseen_seventh.transducer,
    "hash_grid": zoo2_unseen_seventh.hash_grid,
    "slot_attention": zoo2_unseen_seventh.slot_attention,
    "fusion_transformer": zoo2_unseen_seventh.fusion_transformer,
    "extended_lstm": zoo2_unseen_seventh.extended_lstm,
    "tagger": zoo2_unseen_seventh.tagger,
    "mobile_hybrid": zoo2_unseen_seventh.mobile_hybrid,
    "consistency": zoo2_unseen_seventh.Consistency,
    "foresight": zoo2_unseen_seventh.foresight,
}
UNSEEN_EIGHTH = {
    "joint_flow": zoo2_unseen_eighth.joint_flow,
    "griffin": zoo2_unseen_eighth.griffin,
    "big_gan": zoo2_unseen_eighth.BigGan,
    "tab_net": zoo2_unseen_eighth.tab_net,
    "promptable": zoo2_unseen_eighth.promptable,
    "sparse_convnext": zoo2_unseen_eighth.sparse_convnext,
    "gradient_cache": zoo2_unseen_eighth.GradientCache,
    "soft_experts": zoo2_unseen_eighth.soft_experts,
}
UNSEEN_NINTH = {
    "packed_decoder": zoo2_unseen_ninth.packed_decoder,
    "normalized": zoo2_unseen_ninth.Normalized,
    "joint_embedding": zoo2_unseen_ninth.JointEmbedding,
    "set_prediction": zoo2_unseen_ninth.set_prediction,
    "optical_flow": zoo2_unseen_ninth.optical_flow,
    "pair_stack": zoo2_unseen_ninth.pair_stack,
    "spline_network": zoo2_unseen_ninth.spline_network,
    "spline_flow": zoo2_unseen_ninth.spline_flow,
    "fourier_operator": zoo2_unseen_ninth.fourier_operator,
    "soft_actor": zoo2_unseen_ninth.SoftActorCritic,
    "physics": zoo2_unseen_ninth.physics,
}
UNSEEN_TENTH = {
    "equivariant": zoo2_unseen_tenth.equivariant,
    "vocoder": zoo2_unseen_tenth.Vocoder,
    "equilibrium": zoo2_unseen_tenth.equilibrium,
    "shifted_windows": zoo2_unseen_tenth.shifted_windows,
    "segments": zoo2_unseen_tenth.segments,
    "meta_learning": zoo2_unseen_tenth.meta_learning,
    "reversible": zoo2_unseen_tenth.reversible,
    "normalizer_free": zoo2_unseen_tenth.normalizer_free,
    "sequences": zoo2_unseen_tenth.sequences,
    "actors": zoo2_unseen_tenth.actors,
    "depths": zoo2_unseen_tenth.depths,
    "sparse_features": zoo2_unseen_tenth.SparseFeatures,
}
UNSEEN_ELEVENTH = {
    "private": zoo2_unseen_eleventh.Private,
    "replaced": zoo2_unseen_eleventh.replaced,
    "hashed": zoo2_unseen_eleventh.hashed,
    "retrieval": zoo2_unseen_eleventh.retrieval,
    "late_interaction": zoo2_unseen_eleventh.late_interaction,
    "swapped": zoo2_unseen_eleventh.swapped,
    "triplets": zoo2_unseen_eleventh.triplets,
    "quantiles": zoo2_unseen_eleventh.Quantiles,
    "restoration": zoo2_unseen_eleventh.restoration,
    "two_speeds": zoo2_unseen_eleventh.two_speeds,
    "energies": zoo2_unseen_eleventh.Energies,
    "reading": zoo2_unseen_eleventh.reading,
}
UNSEEN_TWELFTH = {
    "separation": zoo2_unseen_twelfth.separation,
    "cycles": zoo2_unseen_twelfth.Cycles,
    "group_policy": zoo2_unseen_twelfth.group_policy,
    "masks": zoo2_unseen_twelfth.Masks,
    "capsules": zoo2_unseen_twelfth.capsules,
    "team": zoo2_unseen_twelfth.Team,
    "neural_process": zoo2_unseen_twelfth.neural_process,
    "covariances": zoo2_unseen_twelfth.covariances,
    "tours": zoo2_unseen_twelfth.tours,
    "spoken": zoo2_unseen_twelfth.spoken,
    "slopes": zoo2_unseen_twelfth.slopes,
    "graph_moments": zoo2_unseen_twelfth.graph_moments,
    "average": zoo2_unseen_thirteenth.Average,
    "speakers": zoo2_unseen_thirteenth.speakers,
    "cascades": zoo2_unseen_thirteenth.cascades,
    "sparse_text": zoo2_unseen_thirteenth.sparse_text,
    "merging": zoo2_unseen_thirteenth.merging,
    "moving_camera": zoo2_unseen_thirteenth.moving_camera,
    "genome": zoo2_unseen_thirteenth.genome,
    "halting": zoo2_unseen_thirteenth.Halting,
    "memory": zoo2_unseen_thirteenth.memory,
    "adapters": zoo2_unseen_thirteenth.adapters,
    "complex_states": zoo2_unseen_thirteenth.complex_states,
    "doing": zoo2_unseen_thirteenth.Doing,
}
PROGRAMS = (
    FIRST
    | SECOND
    | UNSEEN
    | UNSEEN_SINCE
    | UNSEEN_LAST
    | UNSEEN_SEVENTH
    | UNSEEN_EIGHTH
    | UNSEEN_NINTH
    | UNSEEN_TENTH
    | UNSEEN_ELEVENTH
    | UNSEEN_TWELFTH
)
MODES = ("float32", "by_hand", "ours")
# What the bars are of.
BARS = {"v5e": ("mcycles", "gb_accessed", "mb_temp"), "h200": ("gb_written", "mb_temp")}


def step_of(name: str, mode: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A program's train step in one mode, and the types of its arguments."""
    made = PROGRAMS[name](modes.HALF if mode == "by_hand" else jnp.float32)
    step, arguments = made.step, PROGRAMS[name](jnp.float32).arguments()
    if mode == "ours":
        step = jmpr.mixed_precision(step, modes.POLICY)
    return step, arguments


def row(name: str, mode: str, target: str, passes: str = "all") -> dict[str, Any]:
    """One row of the table: see `devices.Cost`."""
    step, arguments = step_of(name, mode)
    donated = tuple(range(len(arguments) - 1))  # all but the batch
    try:
        with jmpr.use_passes(passes):
            found, casts = devices.compiled(target, step, arguments, donated)
    except RuntimeError as error:
        return {"error": str(error).splitlines()[-1]}
    return dataclasses.asdict(devices.measure(target, found, casts))


def ratios(rows: dict[str, Any], target: str) -> dict[str, list[tuple[float, str]]]:
    """Ours by what is written by hand, of each figure of a target, worst first."""
    found: dict[str, list[tuple[float, str]]] = {}
    for name, by_target in rows.items():
        ours, hand = (by_target[target].get(m, {}) for m in ("ours", "by_hand"))
        for figure in BARS[target]:
            if ours.get(figure) and hand.get(figure):
                found.setdefault(figure, []).append((ours[figure] / hand[figure], name))
    return {figure: sorted(each, reverse=True) for figure, each in found.items()}


def main() -> None:
    """Compiles and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=[*PROGRAMS], choices=PROGRAMS)
    parser.add_argument("--targets", nargs="+", default=[*BARS], choices=BARS)
    parser.add_argument(
        "--modes", nargs="+", default=["by_hand", "ours"], choices=MODES
    )
    parser.add_argument("--passes", default="all", help="as `use_passes` takes them")
    parser.add_argument("--json", metavar="FILE", help="add the rows to this file")
    options = parser.parse_args()
    rows: dict[str, Any] = {}
    for name in options.models:
        for target in options.targets:
            by_mode = {
                mode: row(name, mode, target, options.passes) for mode in options.modes
            }
            print_rows(f"{name} {target}", by_mode)
            rows.setdefault(name, {})[target] = by_mode
            if options.json:
                results.merge(options.json, "rows", {name: {target: by_mode}})
    for target in options.targets:
        for figure, found in ratios(rows, target).items():
            mean = math.prod(r for r, _ in found) ** (1 / len(found))
            worst, name = found[0]
            print(f"{target:6}{figure:14}mean {mean:.3f}, worst {worst:.3f} ({name})")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
