"""What `diagnose` is doing, said on standard error where it takes a while."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

# Seconds until the first line, and between one line and the next.
_QUIET, _EVERY = 2.0, 15.0


@contextlib.contextmanager
def stage(what: str) -> Iterator[None]:
    """Says what is running until it is done, from the second second on."""
    done = threading.Event()
    begin = time.monotonic()

    def tell() -> None:
        wait = _QUIET
        while not done.wait(wait):
            seconds = time.monotonic() - begin
            print(f"diagnose: {what} ({seconds:.0f} s)", file=sys.stderr, flush=True)
            wait = _EVERY

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()
