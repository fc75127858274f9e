"""Says what is being compiled, and for how long already."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence

_WIDTH = 79


@contextlib.contextmanager
def progress(titles: Sequence[str], what: str) -> Iterator[Callable[[int], None]]:
    """Shows a bar while things are done, where somebody looks.

    Args:
      titles: of the things.
      what: is being done.

    Yields:
      A function to call with the index of each that is done.
    """
    if _has_bar():
        with _bar(titles, what) as done:
            yield done
    else:
        with _line(titles, what) as done:
            yield done


def _has_bar() -> bool:
    """Whether rich can draw a bar here; in a notebook it needs ipywidgets."""
    try:
        from rich import get_console
    except ImportError:
        return False
    console = get_console()
    if console.is_jupyter:
        return importlib.util.find_spec("ipywidgets") is not None
    return console.is_terminal


@contextlib.contextmanager
def _bar(titles: Sequence[str], what: str) -> Iterator[Callable[[int], None]]:
    from rich import progress

    columns = (
        progress.SpinnerColumn(),
        "{task.description}",
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
    )
    with progress.Progress(*columns, transient=True) as bar:
        task = bar.add_task(_title(titles, 0, what), total=len(titles))

        def update(index: int) -> None:
            title = _title(titles, index + 1, what)
            bar.update(task, advance=1, description=title)

        yield update


@contextlib.contextmanager
def _line(titles: Sequence[str], what: str) -> Iterator[Callable[[int], None]]:
    """The same in one line, which is written over, of a terminal or a notebook."""
    shows = sys.stderr.isatty() or "ipykernel" in sys.modules

    def show(text: str) -> None:
        if shows:
            print(f"\r{text:{_WIDTH}}", end="", file=sys.stderr, flush=True)

    show(f"{_title(titles, 0, what)} (1 of {len(titles)})")
    try:
        yield lambda i: show(f"{_title(titles, i + 1, what)} ({i + 1} done)")
    finally:
        show("")


def _title(titles: Sequence[str], index: int, what: str) -> str:
    return f"{what} {titles[index]}" if index < len(titles) else what
