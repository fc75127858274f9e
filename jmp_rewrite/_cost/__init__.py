"""What a program costs on a device that nobody here holds, by its compiler."""

from jmp_rewrite._cost import figure as figure
from jmp_rewrite._cost.cost import TIME_LIMIT as TIME_LIMIT
from jmp_rewrite._cost.cost import Cost as Cost
from jmp_rewrite._cost.cost import CostRow as CostRow
from jmp_rewrite._cost.cost import cost as cost
from jmp_rewrite._cost.cost import policy_text as policy_text
from jmp_rewrite._cost.subject import Call as Call
from jmp_rewrite._cost.subject import Subject as Subject
from jmp_rewrite._cost.subject import call_of as call_of
from jmp_rewrite._cost.subject import types_of as types_of
