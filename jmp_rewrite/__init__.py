"""Automatic mixed precision for JAX: a function is traced, rewritten and run."""

from jmp_rewrite._policy import Policy as Policy
from jmp_rewrite._policy import check_device as check_device
from jmp_rewrite._policy import get_policy as get_policy
from jmp_rewrite._policy import set_policy as set_policy
from jmp_rewrite._policy import use_policy as use_policy
from jmp_rewrite._rules import Category as Category
from jmp_rewrite._rules import default_rules as default_rules
