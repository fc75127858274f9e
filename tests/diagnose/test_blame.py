"""Who is to blame, on findings made by hand."""

import pytest

from jmp_rewrite._diagnose.blame import Finding, blame
from jmp_rewrite._diagnose.counts import SPOILT, UNKNOWN, Counts
from jmp_rewrite._diagnose.sentences import sentence
from jmp_rewrite._source import Line


def finding(index, error, appeared=0.0, reads=(), line=None, **fields):
    counts = {name: fields.pop(name) for name in list(fields) if name in Counts._fields}
    counts = {"size": 100.0, "left": UNKNOWN, "right": UNKNOWN, **counts}
    return Finding(
        index,
        fields.pop("primitive", "mul"),
        Line("model.py", line or index, "f"),
        counts=Counts(error=error, appeared=appeared, **counts),
        reads=tuple(reads),
        **fields,
    )


def worst(findings, results):
    return [f.index for f in blame(findings, results) if f.blame > 0]


def test_where_it_appears_and_not_where_it_is_handed_on():
    chain = [
        finding(0, 0.001, 0.001),
        finding(1, 0.5, 0.49, [0]),
        finding(2, 0.5, 0.0, [1]),
        finding(3, 0.6, 0.0, [2]),
    ]
    assert worst(chain, {3: 0.6})[0] == 1
    assert 3 not in worst(chain, {3: 0.6})


def temperature():
    """A similarity divided by 1e-4, and a difference of its elements."""
    rounded = {"introduced": 0.0019, "is_half": True, "primitive": "dot_general"}
    return [
        finding(0, 0.002, 0.0019, line=20, **rounded),
        finding(1, 0.002, 0.0, [0], primitive="div"),
        finding(2, 0.9, 0.88, [1], introduced=1e-7, primitive="sub"),
    ]


def test_an_amplified_error_is_that_of_what_was_rounded():
    """The similarity is what should be float32."""
    chain = temperature()
    makes = "makes the error of dot_general at model.py:20 450 times as large"
    assert sentence(chain[2], chain) == f"sub: {makes}"
    first, second, _ = blame(chain, {2: 0.9})
    assert (first.index, first.blame, first.grown) == (0, 0.88, 2)
    assert second.blame == pytest.approx(1e-7)
    becomes = "becomes 450 times as large in sub at model.py:2"
    assert (
        sentence(first, chain) == f"dot_general: its rounding error of 0.20% {becomes}"
    )


def test_an_equation_that_rounds_away_most_is_to_blame_itself():
    chain = temperature()
    own = chain[2].counts._replace(introduced=0.8)
    chain[2] = chain[2].replace(counts=own, is_half=True)
    assert worst(chain, {2: 0.9})[0] == 2


def test_where_nothing_was_rounded_the_amplifier_is_to_blame():
    chain = [finding(0, 0.002, 0.0), finding(1, 0.9, 0.88, [0], primitive="sub")]
    assert worst(chain, {1: 0.9})[0] == 1


def test_few_vanished_values_are_named():
    few = {"underflowed": 1.0, "dtype": "float16", "is_half": True, "primitive": "neg"}
    found = finding(0, 0.001, 0.001, size=1e4, **few)
    assert sentence(found, [found]).startswith("neg: 1 of 10,000 values vanish")


def test_errors_that_reach_no_result_are_not_named():
    """A saturated mask is wrong everywhere, and a softmax forgets it."""
    chain = [
        finding(0, 1.0, 1.0),
        finding(1, 0.002, 0.0, [0]),
        finding(2, 0.3, 0.29),
        finding(3, 0.3, 0.0, [1, 2]),
    ]
    assert worst(chain, {3: 0.3}) == [2, 0]


def test_a_small_term_of_a_sum_does_no_harm():
    chain = [
        finding(0, 1.0, 1.0),
        finding(1, 0.1, 0.1),
        finding(2, 0.1, 0.0, [0, 1], terms=(0, 1), left=1e-6, right=0.1),
    ]
    blamed = {f.index: f.blame for f in blame(chain, {2: 0.1})}
    assert blamed[1] == 0.1 and blamed[0] == 1e-6


def test_the_first_infinity_comes_first():
    chain = [
        finding(0, 0.9, 0.9),
        finding(1, SPOILT + 0.1, SPOILT, [0], nonfinite=1.0),
        finding(2, SPOILT + 1, SPOILT, [1], nonfinite=9.0),
    ]
    assert worst(chain, {2: SPOILT + 1}) == [1, 2, 0]


def test_infinities_that_a_select_hides_do_no_harm():
    chain = [
        finding(0, SPOILT + 1, SPOILT, nonfinite=9.0),
        finding(1, 0.01, 0.0, [0]),
        finding(2, 0.2, 0.2),
        finding(3, 0.2, 0.0, [1, 2]),
    ]
    assert worst(chain, {3: 0.2})[0] == 2


def test_an_epsilon_that_vanished_is_the_cause_of_the_quotient():
    chain = [
        finding(0, 0.001, 0.001),
        finding(1, 0.02, 0.01, [0], underflowed=2.0, zeroed=2.0),
        finding(2, 0.02, 0.0, [1], zeroed=2.0, primitive="max"),
        finding(3, SPOILT + 0.1, SPOILT, [0, 2], nonfinite=2.0, primitive="div"),
    ]
    assert worst(chain, {3: SPOILT + 0.1})[:2] == [1, 3]


def test_a_quotient_that_overflows_by_itself_is_the_cause():
    chain = [
        finding(0, 0.02, 0.01, underflowed=2.0, zeroed=2.0),
        finding(
            1,
            SPOILT + 0.1,
            SPOILT,
            [0],
            nonfinite=2.0,
            introduced=SPOILT + 0.1,
            primitive="div",
        ),
    ]
    assert worst(chain, {1: SPOILT + 0.1})[0] == 1


def test_a_line_that_grows_in_small_steps():
    """A sum that Python unrolls: no step is to blame, the line is."""
    steps = [finding(0, 0.002, 0.002)]
    for i in range(1, 50):
        steps.append(finding(i, 0.002 + 0.004 * i, 0.0, [i - 1], line=7))
    steps.append(finding(50, 0.2, 0.0, [49]))
    first = blame(steps, {50: 0.2})[0]
    assert first.line.number == 7 and first.blame > 0.1


def test_growth_around_a_loop_is_the_lines_own():
    carry = finding(1, 0.0, reads=[0], carried=2, kind="carry").replace(counts=None)
    loop = [
        finding(0, 0.002, 0.002),
        carry,
        finding(2, 0.4, 0.0, [1], line=9),
        finding(3, 0.4, 0.0, [2]),
    ]
    assert worst(loop, {3: 0.4})[0] == 2


def test_harm_goes_around_a_loop():
    """What is lost late in an iteration harms the next one."""
    carry = finding(1, 0.0, reads=[0], carried=3, kind="carry").replace(counts=None)
    loop = [
        finding(0, 0.0),
        carry,
        finding(2, 0.5, 0.0, [1]),
        finding(3, 0.5, 0.5),
        finding(4, 0.5, 0.0, [2]),
    ]
    assert worst(loop, {4: 0.5}) == [3]


def test_a_result_has_the_error_of_its_change():
    """A parameter is off by a part in a thousand when its step is lost."""
    step = [finding(0, 1.0, 1.0), finding(1, 0.001, 0.0, [0])]
    assert blame(step, {1: 1.0})[0].blame == 1.0
    assert blame(step, {1: 0.001})[0].blame == 0.001


def test_without_any_harm_the_roughest_rounding_comes_first():
    chain = [finding(0, 0.001, 0.001, introduced=0.001), finding(1, 0.1, 0.1)]
    chain.append(finding(2, 0.01, 0.01, introduced=0.01))
    assert [f.index for f in blame(chain, {})] == [2, 0, 1]


@pytest.mark.parametrize("error", [0.1, SPOILT + 0.5])
def test_properties(error):
    f = finding(0, error, overflowed=2.0, underflowed=3.0, nonfinite=4.0)
    assert (f.error, f.overflowed, f.underflowed, f.nonfinite) == (error, 2, 3, 4)
    bare = f.replace(counts=None)
    assert (bare.error, bare.introduced, bare.overflowed, bare.underflowed) == (0,) * 4
    assert bare.nonfinite == 0
