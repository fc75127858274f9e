"""Every way to write a policy, every way to write one wrong, and the default."""

import copy
import dataclasses
import logging
import pickle
import threading
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.extend.core import Primitive

from jmp_rewrite._policy import (
    Policy,
    as_policy,
    check_device,
    get_policy,
    is_policy_set,
    set_policy,
    use_policy,
)
from jmp_rewrite._rules.table import Category, default_rules

KNOWN = "'mixed_float16', 'mixed_bfloat16', 'float32', 'auto'"


@pytest.fixture(autouse=True)
def no_default():
    yield
    set_policy(None)


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ("mixed_float16", "float16"),
        ("mixed_bfloat16", "bfloat16"),
        ("float32", "float32"),
        ("float16", "float16"),
        (jnp.float16, "float16"),
        (np.float32, "float32"),
        (jnp.bfloat16, "bfloat16"),
        (ml_dtypes.bfloat16, "bfloat16"),
        (np.dtype("float16"), "float16"),
        ("params=float32,compute=float16,output=float32", "float16"),
        ("params=float32, compute=bfloat16, output=float32", "bfloat16"),
        ("p=f32,c=bf16,o=f32", "bfloat16"),
        ("p=full,c=f16,o=full", "float16"),
        ("c=f16", "float16"),
        ("p=f32", "float32"),
        ("bf16", "bfloat16"),
        ("fp16", "float16"),
        ("f16", "float16"),
        ("f32", "float32"),
    ],
)
def test_compute_dtype(given, dtype):
    policy = Policy(given)
    assert isinstance(policy.compute_dtype, np.dtype)
    assert policy.compute_dtype == dtype
    assert policy.compute_dtype == jnp.dtype(dtype)
    assert str(policy.compute_dtype) == dtype
    assert policy.param_dtype == "float32"
    assert policy.output_dtype is None
    assert policy.name == (dtype if dtype == "float32" else f"mixed_{dtype}")


def test_auto_asks_the_device_when_it_is_used(monkeypatch):
    policy = Policy("auto")
    assert policy.name == "auto"
    for has_bfloat16, dtype, scale in (("1", "bfloat16", None), ("0", "float32", None)):
        monkeypatch.setenv("JMP_REWRITE_CPU_BFLOAT16", has_bfloat16)
        assert policy.compute_dtype == dtype
        assert policy.loss_scale == scale
        assert policy.table() == default_rules(dtype)


@pytest.mark.parametrize(
    ("given", "default"),
    [("mixed_float16", "dynamic"), ("mixed_bfloat16", None), ("float32", None)],
)
def test_loss_scale(given, default):
    assert Policy(given).loss_scale == default
    assert Policy(given, loss_scale=None).loss_scale is None
    assert Policy(given, loss_scale="dynamic").loss_scale == "dynamic"
    assert Policy(given, loss_scale=128).loss_scale == 128
    assert Policy(given, loss_scale=np.float32(0.5)).loss_scale == 0.5
    assert Policy("auto", loss_scale=8.0).loss_scale == 8.0


def test_table_is_the_defaults_under_the_rules():
    policy = Policy("mixed_float16", rules={"exp": "infer", "mul": Category.DENY})
    expected = {
        **default_rules("float16"),
        "exp": Category.INFER,
        "mul": Category.DENY,
    }
    assert policy.table() == expected
    assert policy.rules == {"exp": Category.INFER, "mul": Category.DENY}
    assert policy.table() is policy.table()
    assert Policy("mixed_bfloat16").table() == default_rules("bfloat16")


def test_a_primitive_of_ones_own_is_a_key():
    own = Primitive("my_fused_op")
    policy = Policy("mixed_bfloat16", rules={own: "allow"})
    assert policy.rules == {"my_fused_op": Category.ALLOW}
    assert policy.table()["my_fused_op"] is Category.ALLOW
    assert repr(policy) == "Policy('mixed_bfloat16', rules={my_fused_op: 'allow'})"


def test_rules_that_a_policy_hands_out_it_takes():
    own = Primitive("my_fused_op")
    policy = Policy("mixed_bfloat16", rules={own: "allow", "exp": "infer"})
    for again in (
        policy.rules,
        {**policy.rules},
        pickle.loads(pickle.dumps(policy)).rules,
    ):
        copy = Policy("mixed_bfloat16", rules=again)
        assert copy == policy and repr(copy).count("{my_fused_op: 'allow', ") == 1


def test_what_is_given_beside_a_policy_is_not_taken_from_it():
    """Whatever it is given as, the default included."""
    given = Policy(
        "fp16",
        rules={"exp": "infer"},
        scopes={"a": "half"},
        loss_scale=2,
        reduce_dtype="float16",
    )
    assert Policy(given) == given
    assert Policy(given, reduce_dtype=None).reduce_dtype == np.float32
    none = {"rules": {}, "scopes": {}, "loss_scale": None, "reduce_dtype": None}
    assert Policy(given, **none) == Policy("fp16", **none)
    assert given.replace(reduce_dtype=None).reduce_dtype == np.float32


def test_mappings_are_read_only_copies():
    rules, scopes = {"exp": "infer"}, {"head": "float32"}
    policy = Policy("mixed_float16", rules=rules, scopes=scopes)
    rules["mul"], scopes["tail"] = "deny", "float32"
    assert policy.rules == {"exp": Category.INFER}
    assert policy.scopes == {"head": "float32"}
    assert "mul" not in repr(policy)
    for mapping in (policy.rules, policy.scopes, policy.table()):
        with pytest.raises(TypeError, match="does not support item assignment"):
            mapping["exp"] = Category.ALLOW


@pytest.mark.parametrize(
    "written",
    [
        "Policy('mixed_float16')",
        "Policy('auto')",
        "Policy('c=f16')",
        "Policy('mixed_float16', rules={'exp': 'infer'})",
        "Policy('mixed_bfloat16', scopes={'a/b': 'float32', '^c$': 'half'})",
        "Policy('float32', rules={'exp': 'infer'}, scopes={'a': 'float32'}, "
        "loss_scale=2.5)",
        "Policy('mixed_float16', loss_scale=None)",
        "Policy('mixed_bfloat16', loss_scale='dynamic')",
        "Policy('bf16', reduce_dtype='bfloat16')",
    ],
)
def test_prints_as_it_is_written(written):
    policy = eval(written)
    assert repr(policy) == written
    assert eval(repr(policy)) == policy


def test_prints_dtypes_and_categories_by_name():
    policy = Policy(jnp.float16, rules={"exp": Category.INFER})
    assert repr(policy) == "Policy('float16', rules={'exp': 'infer'})"


def test_equal_if_they_mean_the_same():
    policies = {
        Policy("mixed_float16"),
        Policy(jnp.float16),
        Policy("params=float32,compute=float16,output=float32"),
        Policy("mixed_float16", rules={}, loss_scale="dynamic"),
    }
    assert len(policies) == 1
    rules = {"exp": "infer", "mul": "deny"}
    turned = dict(reversed(rules.items()))
    assert Policy("float16", rules=rules) == Policy("float16", rules=turned)


@pytest.mark.parametrize(
    "other",
    [
        Policy("mixed_bfloat16"),
        Policy("mixed_float16", rules={"exp": "infer"}),
        Policy("mixed_float16", scopes={"a": "half"}),
        Policy("mixed_float16", loss_scale=None),
        Policy("auto"),
        "mixed_float16",
    ],
)
def test_different_if_anything_differs(other):
    assert Policy("mixed_float16") != other


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda p: p.replace()])
def test_copies(clone):
    policy = Policy("c=f16", rules={"exp": "infer"}, scopes={"a": "half"}, loss_scale=2)
    assert clone(policy) == policy
    assert repr(clone(policy)) == repr(policy)


def test_pickles():
    policy = Policy("auto", rules={"exp": "infer"}, scopes={"a": "half"})
    assert pickle.loads(pickle.dumps(policy)) == policy


def test_replace_changes_what_it_names():
    policy = Policy("mixed_float16", rules={"exp": "infer"}, loss_scale=2)
    assert policy.replace(rules={"exp": "clear"}) == Policy(
        "mixed_float16", rules={"exp": "clear"}, loss_scale=2
    )
    assert policy.replace(compute_dtype="bfloat16").compute_dtype == "bfloat16"


def test_a_policy_of_a_policy_means_the_same():
    policy = Policy(
        "mixed_float16", rules={"exp": "infer"}, scopes={"a": "float32"}, loss_scale=2
    )
    assert Policy(policy) == policy
    assert Policy(policy, loss_scale=None) == policy.replace(loss_scale=None)
    other = Policy(policy, scopes={"b": "half"})
    assert other == policy.replace(scopes={"b": "half"})
    assert Policy(policy, scopes={}) == policy.replace(scopes={})
    assert Policy(policy, rules={}) == policy.replace(rules={})


def test_frozen():
    policy = Policy("mixed_float16")
    with pytest.raises(dataclasses.FrozenInstanceError, match=r"replace\(loss_scale="):
        policy.loss_scale = None
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot delete"):
        del policy._dtype
    assert policy.loss_scale == "dynamic"


@pytest.mark.parametrize(
    "wrong",
    ["mixed_float64", "float8", "", "half", "f8", np.float64, np.int32, "int8", bool],
)
def test_unknown_policy(wrong):
    with pytest.raises(ValueError, match=f"expected a policy: {KNOWN}.*; got "):
        Policy(wrong)


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("mixed_bflaot16", "mixed_bfloat16"),
        ("mixed_fp16", "mixed_float16"),
        ("bfloat", "bfloat16"),
        ("flaot32", "float32"),
        ("Auto", "auto"),
        ("bf-16", "bf16"),
        ("Mixed-BFloat16", "mixed_bfloat16"),
        ("MIXED_FLOAT16", "mixed_float16"),
        ("bf16-mixed", "bf16"),  # PyTorch Lightning's
    ],
)
def test_a_misspelt_policy_is_answered_with_the_nearest(wrong, near):
    with pytest.raises(ValueError, match=f"did you mean '{near}'"):
        Policy(wrong)


def test_no_guess_between_two():
    with pytest.raises(ValueError, match="got 'half'$"):
        Policy("half")


@pytest.mark.parametrize("name", ["mixed_bfloat16", "mixed_float16", "float32"])
def test_policies_of_keras(name, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras")
    policy = as_policy(keras.DTypePolicy(name))
    assert policy == Policy(name) and repr(policy) == f"Policy({name!r})"
    with pytest.raises(ValueError, match="variables are bfloat16.*'mixed_bfloat16'"):
        Policy(keras.DTypePolicy("bfloat16"))


class Jmp(NamedTuple):
    """What of `jmp.Policy` is read."""

    param_dtype: str
    compute_dtype: str
    output_dtype: str

    def __str__(self):
        return "p={},c={},o={}".format(*self)


def test_policies_of_jmp():
    policy = Policy(Jmp("full", "bf16", "full"))
    assert policy == Policy("mixed_bfloat16") and repr(policy).startswith("Policy('p=")
    with pytest.raises(ValueError, match="expected output=float32, got output=bf"):
        Policy(Jmp("full", "bf16", "bf16"))


@pytest.mark.parametrize(
    ("compute", "given", "dtype"),
    [
        ("mixed_bfloat16", None, "float32"),
        ("mixed_bfloat16", "float32", "float32"),
        ("mixed_bfloat16", "bf16", "bfloat16"),
        ("mixed_bfloat16", jnp.bfloat16, "bfloat16"),
        ("mixed_float16", np.float16, "float16"),
        ("float32", "float32", "float32"),
        ("auto", "float32", "float32"),
    ],
)
def test_reduce_dtype(compute, given, dtype):
    policy = Policy(compute, reduce_dtype=given)
    assert isinstance(policy.reduce_dtype, np.dtype) and policy.reduce_dtype == dtype
    assert (policy == Policy(compute)) == (dtype == "float32")
    assert eval(repr(policy)) == policy == pickle.loads(pickle.dumps(policy))
    assert hash(policy.replace()) == hash(policy)


@pytest.mark.parametrize(
    ("compute", "wrong", "expected"),
    [
        ("mixed_bfloat16", "float16", "float32 or the compute dtype, bfloat16; got 'f"),
        ("mixed_bfloat16", np.float64, "reduce_dtype None, float32 or .*; got <class"),
        ("auto", "bfloat16", "the compute dtype, which auto leaves open; got 'bfl"),
        ("float32", "bfloat16", "the compute dtype, float32; got 'bfloat16'"),
    ],
)
def test_wrong_reduce_dtype(compute, wrong, expected):
    with pytest.raises(ValueError, match=expected):
        Policy(compute, reduce_dtype=wrong)


@pytest.mark.parametrize("wrong", [None, 3, 1.5, ["mixed_float16"], Category.ALLOW])
def test_no_policy(wrong):
    with pytest.raises(TypeError, match=f"expected a policy: {KNOWN}.*; got "):
        Policy(wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            "params=float16,compute=float16",
            "expected params=float32, got params=float16",
        ),
        ("p=bf16,c=bf16", "expected params=float32, got params=bfloat16"),
        ("p=f32;c=f16", "name each once, commas between them"),
        ("c=f16,compute=bf16", "name each once, commas between them"),
        ("p=f32,c=f16,o=f16", "expected output=float32, got output=float16"),
        ("c=f16,o=float64", "expected output=float32, got output=float64"),
        ("compute=float64", f"expected a policy: {KNOWN}.*compute=float64"),
        ("compute=", f"expected a policy: {KNOWN}.*'compute='"),
        ("dtype=float16", "names 'dtype'"),
        ("c=f16,", "names ''"),
    ],
)
def test_wrong_jmp_form(wrong, message):
    with pytest.raises(ValueError, match=message):
        Policy(wrong)


def test_a_primitive_has_one_category():
    with pytest.raises(ValueError, match="one category for 'exp', got 'infer' and 'd"):
        Policy("bf16", rules={jax.lax.exp_p: "infer", "exp": "deny"})


def test_unknown_rule_names_the_nearest():
    with pytest.raises(
        ValueError, match="got 'reduce_summ': the nearest is 'reduce_sum"
    ):
        Policy("mixed_float16", rules={"reduce_summ": "infer"})
    with pytest.raises(ValueError, match="got 'matmul': the nearest is 'dot_general'"):
        Policy("mixed_bfloat16", rules={"matmul": "deny"})
    with pytest.raises(ValueError, match="got 'dot': the nearest is 'dot_general'"):
        Policy("mixed_float16", rules={"dot": "infer"})
    with pytest.raises(ValueError, match="as jax.make_jaxpr prints it.*the nearest is"):
        Policy("mixed_float16", rules={"!": "infer"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"rules": {"exp": "never"}},
            "one of 'allow', 'infer', 'deny', 'clear', got 'never' for 'exp'",
        ),
        ({"scopes": {"(": "float32"}}, r"expected a regular expression, got '\('"),
        (
            {"scopes": {"a": "float16"}},
            "'float32' or 'half' for the scope 'a', got 'fl",
        ),
        ({"scopes": {"a": None}}, "'float32' or 'half' for the scope 'a', got None"),
        ({"loss_scale": 0}, "loss_scale 'dynamic', None or a number > 0, got 0"),
        ({"loss_scale": -1.0}, "a number > 0, got -1.0"),
        ({"loss_scale": float("nan")}, "a number > 0, got nan"),
        ({"loss_scale": float("inf")}, "a number > 0, got inf"),
        ({"loss_scale": "static"}, "a number > 0, got 'static'"),
    ],
)
def test_wrong_value(arguments, message):
    with pytest.raises(ValueError, match=message):
        Policy("mixed_float16", **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rules": {"exp": 1}}, "a Category or a string, got 1 for 'exp'"),
        ({"rules": {1: "infer"}}, "a primitive's name or a Primitive, got 1"),
        ({"rules": ["exp"]}, "rules to be a mapping of primitive name"),
        ({"scopes": {1: "half"}}, "expected a regular expression, got 1"),
        ({"scopes": "head"}, "scopes to be a mapping of regular expression"),
        ({"loss_scale": True}, "a number > 0, got True"),
        ({"loss_scale": [1.0]}, r"a number > 0, got \[1.0\]"),
        ({"loss_scale": np.ones(2)}, r"a number > 0, got array"),
    ],
)
def test_wrong_type(arguments, message):
    with pytest.raises(TypeError, match=message):
        Policy("mixed_float16", **arguments)


def test_half_scope_needs_a_half_dtype():
    with pytest.raises(ValueError, match="scope 'a' asks for 'half'.*float32 policy"):
        Policy("float32", scopes={"a": "half"})
    assert Policy("auto", scopes={"a": "half"}).scopes == {"a": "half"}


def test_as_policy():
    policy = Policy("mixed_float16")
    assert as_policy(policy) is policy
    assert as_policy("mixed_float16") == as_policy(jnp.float16) == policy
    with use_policy("mixed_bfloat16"):
        assert as_policy(None) == Policy("mixed_bfloat16")
    with pytest.raises(ValueError, match=KNOWN):
        as_policy("fp8")
    with pytest.raises(TypeError, match=KNOWN):
        as_policy(16)


def test_default_is_auto_until_set():
    assert get_policy() == Policy("auto")
    assert not is_policy_set()
    set_policy("mixed_float16")
    assert get_policy() == Policy("mixed_float16")
    assert is_policy_set()
    set_policy(None)
    assert get_policy() == Policy("auto")
    assert not is_policy_set()


def test_use_policy_nests_and_restores():
    set_policy("float32")
    with use_policy("mixed_float16") as outer:
        assert get_policy() == outer == Policy("mixed_float16")
        with use_policy(jnp.bfloat16):
            assert get_policy() == Policy("mixed_bfloat16")
        assert get_policy() == outer
        with pytest.raises(RuntimeError, match="inside"), use_policy("float32"):
            raise RuntimeError("inside")
        assert get_policy() == outer
    assert get_policy() == Policy("float32")


def test_a_wrong_default_changes_nothing():
    set_policy("mixed_float16")
    with pytest.raises(ValueError, match=KNOWN):
        set_policy("fp8")
    with pytest.raises(ValueError, match=KNOWN), use_policy("fp8"):
        pass
    assert get_policy() == Policy("mixed_float16")


def in_a_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_set_policy_is_for_all_threads_and_use_policy_for_one():
    set_policy("mixed_bfloat16")
    assert in_a_thread(get_policy) == Policy("mixed_bfloat16")
    with use_policy("mixed_float16"):
        assert in_a_thread(get_policy) == Policy("mixed_bfloat16")
    in_a_thread(lambda: set_policy("float32"))
    assert get_policy() == Policy("float32")


def test_jitted_code_is_traced_again_when_the_policy_changes():
    traced = []

    @jax.jit
    def f(x):
        traced.append(get_policy().name)
        return x

    x = np.float32(1)
    set_policy("float32")
    f(x), f(x)
    assert traced == ["float32"]
    set_policy("mixed_float16")
    f(x), f(x)
    assert traced == ["float32", "mixed_float16"]
    with use_policy("mixed_bfloat16"):
        f(x), f(x)
    assert traced == ["float32", "mixed_float16", "mixed_bfloat16"]
    f(x)
    in_a_thread(lambda: f(x))
    with use_policy(Policy(jnp.bfloat16)):  # equal to one that was traced
        f(x)
    set_policy("float32")
    f(x)
    assert len(traced) == 3
    set_policy(Policy("float32", scopes={"a": "float32"}))
    in_a_thread(lambda: f(x))
    f(x)
    assert len(traced) == 4


def test_an_inner_jit_is_traced_again_too():
    traced = []
    inner = jax.jit(lambda x: traced.append(get_policy().name) or x)
    for name in ("mixed_float16", "mixed_bfloat16", "mixed_float16"):
        with use_policy(name):
            jax.eval_shape(lambda x: inner(x), np.float32(1))
    assert traced == ["mixed_float16", "mixed_bfloat16"]


def test_a_policy_is_a_static_argument_of_jit():
    traced = []

    def f(x, policy):
        traced.append(policy)
        return x

    jitted = jax.jit(f, static_argnums=1)
    jitted(np.float32(1), Policy("mixed_float16"))
    jitted(np.float32(1), Policy(jnp.float16))
    jitted(np.float32(1), Policy("float32"))
    assert traced == [Policy("mixed_float16"), Policy("float32")]


def test_check_device_says_and_logs_whether_it_is_fast(caplog):
    with caplog.at_level(logging.INFO, logger="jmp_rewrite"):
        fine = check_device("float32")
        slow = check_device("mixed_float16")
    assert fine.ok and not slow.ok  # float16 is slower than float32 on CPUs
    assert slow.policy == "mixed_float16" and slow.platform == "cpu"
    assert len(slow.devices) == len(jax.local_devices())
    logged = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert logged == [("INFO", str(fine)), ("WARNING", str(slow))]


def test_check_device_takes_the_default_policy():
    with use_policy("mixed_float16"):
        assert check_device().policy == "mixed_float16"
    assert check_device("auto").ok  # what it picks is fast by definition


@pytest.mark.slow
def test_importing_and_writing_policies_starts_no_backend(run_python):
    code = (
        "import jax\n"
        "from jmp_rewrite._policy import Policy, set_policy, get_policy\n"
        "set_policy(Policy('auto', rules={'exp': 'infer'}))\n"
        "hash(get_policy()), repr(get_policy())\n"
        "jax.config.update('jax_platforms', 'no_such_platform')\n"
        "try: jax.devices()\n"
        "except RuntimeError as error: assert 'no_such_platform' in str(error)\n"
        "else: raise SystemExit('a backend was up already')"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
