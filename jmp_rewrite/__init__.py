"""Automatic mixed precision for JAX: a function is traced, rewritten and run."""

from jmp_rewrite._cost import Cost as Cost
from jmp_rewrite._diagnose import Diagnosis as Diagnosis
from jmp_rewrite._diagnose import diagnose as diagnose
from jmp_rewrite._explain import Report as Report
from jmp_rewrite._explain import explain as explain
from jmp_rewrite._graph import compute_dtype as compute_dtype
from jmp_rewrite._graph import full_precision as full_precision
from jmp_rewrite._graph import half_precision as half_precision
from jmp_rewrite._inference import for_inference as for_inference
from jmp_rewrite._loss_scaling import LossScaleState as LossScaleState
from jmp_rewrite._loss_scaling import all_finite as all_finite
from jmp_rewrite._loss_scaling import loss_scale_state as loss_scale_state
from jmp_rewrite._loss_scaling import loss_scaling as loss_scaling
from jmp_rewrite._loss_scaling import scale_loss as scale_loss
from jmp_rewrite._loss_scaling import unscale as unscale
from jmp_rewrite._loss_scaling import where_applied as where_applied
from jmp_rewrite._passes import use_passes as use_passes
from jmp_rewrite._policy import Policy as Policy
from jmp_rewrite._policy import check_device as check_device
from jmp_rewrite._policy import get_policy as get_policy
from jmp_rewrite._policy import set_policy as set_policy
from jmp_rewrite._policy import use_policy as use_policy
from jmp_rewrite._rules import Category as Category
from jmp_rewrite._rules import default_rules as default_rules
from jmp_rewrite._train import (
    enable_mixed_precision_graph_rewrite as enable_mixed_precision_graph_rewrite,
)
from jmp_rewrite._train import make_train_step as make_train_step
from jmp_rewrite._transform import mixed_precision as mixed_precision
from jmp_rewrite._transform import mixed_precision_jaxpr as mixed_precision_jaxpr

__version__ = "0.1.0.dev0"
