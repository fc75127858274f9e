"""The command line: the main job trains, ``rules``, ``devices``, ``estimate`` look.

What the training alone needs (scikit-learn, matplotlib, rich) is imported when it runs.
"""

import argparse
import difflib
import importlib.util
import logging
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import numpy as np

import jmp_rewrite
from jmp_rewrite._devices import why_auto_is_float32
from jmp_rewrite._passes import PASSES
from jmp_rewrite._policy import Policy, check_device
from jmp_rewrite._rules import Category, default_rules, reason

if TYPE_CHECKING:
    from jmp_rewrite._demo import Course, Digits, Run

PROG = "python -m jmp_rewrite"
POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")
PNG = "jmp_rewrite.png"
_LARGEST_SEED = 2**32 - 1  # NumPy's, and so scikit-learn's


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (--help shows what there is)\n")


def _count(text: str) -> int:
    return _integer(text, least=1)


def _index(text: str) -> int:
    return _integer(text, least=0)


def _seed(text: str) -> int:
    seed = _index(text)
    if seed > _LARGEST_SEED:
        raise argparse.ArgumentTypeError(
            f"expected an integer of at most {_LARGEST_SEED}, got {text!r}"
        )
    return seed


def _integer(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(
            f"expected an integer of at least {least}, got {text!r}"
        )
    return int(text)


def _policy(text: str) -> str:
    try:
        Policy(text)
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _policies(text: str) -> list[str]:
    return [_policy(name) for name in text.split(",")]


def _half_dtype(text: str) -> str:
    dtype = Policy(_policy(text)).compute_dtype
    if dtype == np.float32:
        raise argparse.ArgumentTypeError(f"expected bfloat16 or float16, got {text!r}")
    return str(dtype)


def _png(text: str) -> pathlib.Path:
    path = pathlib.Path(text)
    path = path / PNG if path.is_dir() else path
    if path.suffix != ".png":
        raise argparse.ArgumentTypeError(f"{text} is no directory and no .png file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path.parent} is no directory")
    return path


def _training_parser() -> argparse.ArgumentParser:
    """Builds the parser of the main job."""
    parser = _Parser(
        prog=PROG,
        description="Trains the model of Keras' mixed precision guide on handwritten "
        "digits under several policies, prints a table and draws the curves.",
        epilog=f"`{PROG} rules` prints the category of each primitive; `{PROG} devices`"
        f" says which policy is fast here; `{PROG} passes` prints the passes; `{PROG} "
        "estimate` what a program costs on a device that you need not hold.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    version = f"jmp_rewrite {jmp_rewrite.__version__}, JAX {jax.__version__}"
    add("--version", action="version", version=version, help="print the versions")
    add("--units", type=_count, help="width (default: 4096; 1024 on a CPU)")
    add("--epochs", type=_count, default=30, help="passes over the data (%(default)s)")
    add("--batch-size", type=_count, default=256, help="images a step (%(default)s)")
    add(
        "--policies",
        type=_policies,
        default=list(POLICIES),
        metavar="NAME,NAME",
        help=f"what to compare (default: {','.join(POLICIES)})",
    )
    add("--seed", type=_seed, default=0, help="of split, weights, order (%(default)s)")
    add(
        "--out",
        type=_png,
        default=pathlib.Path(PNG),
        metavar="PATH",
        help="the figure: a .png file or a directory (default: %(default)s)",
    )
    add(
        "--force-overflow",
        type=_index,
        metavar="STEP",
        help="make this step (from 0) overflow where the loss is scaled",
    )
    return parser


def _train(argv: Sequence[str]) -> None:
    """Runs the main job."""
    parser = _training_parser()
    args = parser.parse_args(argv)
    missing = [m for m in ("sklearn", "matplotlib", "rich") if not _installed(m)]
    if missing:
        parser.exit(
            1,
            f"{parser.prog}: the training needs {', '.join(missing)}: "
            "pip install 'jmp_rewrite[demo]', or '.[demo]' in a checkout\n",
        )
    from jmp_rewrite._demo import report, train

    units = args.units or (1024 if jax.default_backend() == "cpu" else 4096)
    course = train.Course(
        units, args.epochs, args.batch_size, args.seed, args.force_overflow
    )
    digits = train.load_digits(args.seed)
    _check(parser, args.policies, digits, course)
    runs = _train_all(args.policies, digits, course)
    report.save_figure(runs, args.out)
    _print(report.table(runs))
    if note := report.slow_note(args.policies):
        _print(f"{note}\n")
    print(f"The curves are in {args.out}.")


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _check(
    parser: argparse.ArgumentParser,
    policies: Sequence[str],
    digits: "Digits",
    course: "Course",
) -> None:
    """Refuses what can only be judged together with the data."""
    images = len(digits.train_labels)
    if course.batch_size > images:
        parser.error(f"--batch-size must be at most {images}, the training images")
    if course.force_overflow is None:
        return
    steps = course.epochs * digits.steps_per_epoch(course)
    if course.force_overflow >= steps:
        parser.error(f"--force-overflow must be below {steps}, the number of steps")
    if all(Policy(name).loss_scale is None for name in policies):
        parser.error("--force-overflow needs a policy with loss scaling: mixed_float16")


def _train_all(
    policies: Sequence[str], digits: "Digits", course: "Course"
) -> "list[Run]":
    """Trains one policy after the other behind a progress bar."""
    from rich import progress

    from jmp_rewrite._demo import train

    device = jax.devices()[0].device_kind
    steps = course.epochs * digits.steps_per_epoch(course)
    print(f"{course.units} units, {steps} steps, JAX {jax.__version__} on {device}")
    shown = "loss {task.fields[loss]:.4f}"
    with progress.Progress(*progress.Progress.get_default_columns(), shown) as bar:
        runs = []
        for name in policies:
            task = bar.add_task(name, total=steps, loss=float("nan"))

            def show(run: "Run", task: progress.TaskID = task) -> None:
                bar.update(task, advance=1, loss=run.losses[-1])

            runs.append(train.train(name, digits, course, show))
    return runs


def _print(renderable: Any) -> None:
    """Prints in the terminal's width, or whole where there is none."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else 100
    Console(width=width, highlight=False).print(renderable)


def _rules(argv: Sequence[str]) -> None:
    """Prints the rule table, a line a primitive."""
    parser = _Parser(
        prog=f"{PROG} rules",
        description="Prints each primitive's category, and why it has it.",
    )
    parser.add_argument(
        "--dtype",
        type=_half_dtype,
        metavar="{bfloat16,float16}",
        default="float16",
        help="the compute dtype (default: %(default)s)",
    )
    rules = default_rules(parser.parse_args(argv).dtype)
    width = max(map(len, rules))
    print(
        "\n".join(
            f"{category.name:5}  {name:{width}}  {reason(name, category)}"
            for category in Category
            for name in sorted(rules)
            if rules[name] is category
        )
    )


def _devices(argv: Sequence[str]) -> None:
    """Prints the compatibility check."""
    parser = _Parser(
        prog=f"{PROG} devices",
        description="Says what this process computes on, and whether a policy is fast.",
    )
    parser.add_argument(
        "--policy",
        type=_policy,
        metavar="NAME",
        help="the policy to judge (default: the one that this device gets; both half "
        "types where it gets float32)",
    )
    policy = parser.parse_args(argv).policy
    # What is printed need not be logged to the same terminal.
    logging.getLogger("jmp_rewrite").addHandler(logging.NullHandler())
    if policy is None and (why := why_auto_is_float32()):
        print(f"{why}.\n")
        print("\n\n".join(str(check_device(Policy(name))) for name in POLICIES[1:]))
    else:
        print(check_device(Policy(policy or "auto")))


def _passes(argv: Sequence[str]) -> None:
    """Prints the passes, in their order."""
    _Parser(
        prog=f"{PROG} passes",
        description="Prints the passes: what each is for, on which devices, what may "
        "change there, and the measured gain.",
    ).parse_args(argv)
    width = max(len(p.name) for p in PASSES)
    for own in PASSES:
        devices = ", ".join(own.devices)
        print(f"{own.name:{width}}  {devices}; changes {own.changes}")
        print(f"{'':{width}}  {own.reason}.")
        print(f"{'':{width}}  Gain: {own.gain}.")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"expected seconds above 0, got {text!r}")
    return seconds


def _estimate_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=f"{PROG} estimate",
        description="Says what a program costs on devices that you need not hold, by "
        "their compilers: memory, whether it fits, bytes, and cycles on TPUs.",
        epilog="Without --shapes FUNCTION takes no argument and returns what to "
        "estimate and its arguments: `return train_step, (params, opt_state, batch)`, "
        "arrays or jax.ShapeDtypeStruct.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("function", metavar="MODULE:FUNCTION", help="or FILE.py:FUNCTION")
    add(
        "--device",
        action="append",
        required=True,
        metavar="NAME",
        help="'TPU v5e', 'NVIDIA H100', 'TPU v5e:4x4'; may be said several times",
    )
    add("--policy", type=_policy, metavar="NAME", help="beside float32; default: the "
        "function's own, or mixed_bfloat16")  # fmt: skip
    add("--shapes", nargs="+", metavar="TYPE", help="of FUNCTION's arguments: f32[8,2]")
    add("--largest-batch", action="store_true", help="search it, too; takes long")
    add("--time-limit", type=_seconds, metavar="SECONDS", help="of each compilation")
    add("--html", type=pathlib.Path, metavar="PATH", help="where to write HTML, too")
    return parser


def _estimate(argv: Sequence[str]) -> None:
    """Prints what a program costs on devices."""
    parser = _estimate_parser()
    args = parser.parse_args(argv)
    if not os.environ.get("JAX_PLATFORMS"):  # it is only traced here
        jax.config.update("jax_platforms", "cpu")
    from jmp_rewrite._explain import named

    asked: dict[str, Any] = {}
    if args.time_limit is not None:
        asked["time_limit"] = args.time_limit
    if args.policy is not None:  # whatever the function itself says
        asked["policies"] = ["float32", args.policy]
    try:
        report = named.report(args.function, args.shapes, args.policy)
        cost = report.cost(*args.device, **asked)
        print(cost, end="")
        if args.largest_batch:
            print(f"\n{cost.largest_batch()}", end="")
        if args.html:
            cost.save_html(args.html)
    except ModuleNotFoundError as error:
        module = args.function.partition(":")[0]
        if error.name not in (module, module.partition(".")[0]):
            parser.exit(1, f"{parser.prog}: {error}\n")
        parser.error(f"there is no module {error.name!r}: is it on the path?")
    except ImportError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    except (OSError, TypeError, ValueError) as error:
        parser.error((str(error).splitlines() or [type(error).__name__])[0])
    if any(row.fits is None for row in cost.rows):
        raise SystemExit(1)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line.

    Args:
      argv: the arguments; those of the process if None.

    Raises:
      SystemExit: with code 2 for a bad argument, 1 where a package is missing.
    """
    argv = sys.argv[1:] if argv is None else argv
    commands = {
        "rules": _rules,
        "devices": _devices,
        "passes": _passes,
        "estimate": _estimate,
    }
    name = argv[0] if argv else ""
    command = commands.get(name)
    if name and not command and not name.startswith("-"):
        near = difflib.get_close_matches(name, commands, n=1)
        hint = f": did you mean {near[0]!r}?" if near else ""
        _Parser(prog=PROG).error(
            f"expected one of the commands {', '.join(commands)}, got {name!r}{hint}"
        )
    try:
        command(argv[1:]) if command else _train(argv)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has left: `python -m jmp_rewrite rules | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
