"""The examples run as they stand, and print what their docstrings say."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = {path.stem: path for path in sorted((ROOT / "examples").glob("*.py"))}
DIGITS = ("--epochs", "1", "--width", "4", "--batch", "256")
TRANSFORMER = ("--width", "16", "--layers", "1", "--heads", "2", "--batch", "2")
SMALL = {
    "char_transformer": (*TRANSFORMER, "--length", "8", "--steps", "8"),
    "decode_with_cache": (*TRANSFORMER, "--length", "24", "--steps", "2"),
    "digits_equinox": DIGITS,
    "digits_haiku": DIGITS,
    "digits_keras": DIGITS,
    "digits_nnx": DIGITS,
    "float16_overflow": ("--steps", "6", "--width", "16", "--batch", "8"),
    "fsdp_orbax": ("--steps", "4", "--width", "16", "--batch", "16"),
}
NEEDS = {
    "char_transformer": "flax",
    "digits_equinox": "equinox",
    "digits_haiku": "haiku",
    "digits_keras": "keras",
    "digits_nnx": "flax",
    "fsdp_orbax": "orbax.checkpoint",
}
NUMBER = re.compile(r"nan|\d+(?:,\d{3})*(?:\.\d+)?")
each = pytest.mark.parametrize("name", EXAMPLES)


def docstring(name):
    return ast.get_docstring(ast.parse(EXAMPLES[name].read_text()))


def expected(name):
    """The lines that an example's docstring says it prints."""
    block = docstring(name).partition("Expected output")[2].partition("\n")[2]
    return [line.strip() for line in block.splitlines()]


def words(line):
    """A line without its numbers; of one that ends in ..., how it begins."""
    if line.endswith(" ..."):
        line = line.removesuffix("...")
    return re.sub(r"\s+", " ", NUMBER.sub("#", line)).strip()


def numbers(line):
    return [float(x.replace(",", "")) for x in NUMBER.findall(line)]


def run(run_python, name, *flags):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    ran = run_python(str(EXAMPLES[name]), *flags)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_these_are_all():
    assert set(EXAMPLES) == set(SMALL)
    text = (ROOT / "examples" / "README.md").read_text()
    assert set(re.findall(r"\]\((\w+)\.py\)", text)) == set(EXAMPLES)


@pytest.mark.slow
@pytest.mark.breadth(one_in=10)
@each
def test_runs_small(name, run_python):
    """Every line has the words of one in the docstring, in the same order."""
    shown = [words(line) for line in run(run_python, name, *SMALL[name])]
    said = [words(line) for line in expected(name)]
    assert len(shown) > 1
    for line in shown:
        assert any(line.startswith(words) for words in said), line
    assert shown[-1].startswith(said[-1])


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
@each
def test_prints_what_its_docstring_says(name, run_python):
    """Within a fifth: libraries' versions and processors round differently."""
    shown, said = run(run_python, name), expected(name)
    for line, wanted in zip(shown, said, strict=True):
        assert words(line).startswith(words(wanted))
        if not wanted.endswith((" ...", "ms a step")):
            close = pytest.approx(numbers(wanted), rel=0.2, abs=0.1, nan_ok=True)
            assert numbers(line) == close, line


@each
def test_a_docstring_shows_the_command(name):
    assert f"python examples/{name}.py\n" in docstring(name) + "\n" or (
        f"python examples/{name}.py " in docstring(name)
    )
    for flag in re.findall(r"--[\w-]+", docstring(name)):
        assert f'"{flag}"' in EXAMPLES[name].read_text(), flag
