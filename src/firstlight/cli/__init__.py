# SPDX-License-Identifier: Apache-2.0
"""The `firstlight` command: parse, call, print.

stdout carries results, stderr everything else. Exit codes: 0 success, 1 failure, 2 wrong usage,
130 interrupted.
"""

from __future__ import annotations

import gc
import os
import sys

TYPE_CHECKING = False  # not from `typing`: until main() runs, Ctrl-C ends in a traceback
if TYPE_CHECKING:
    from typing import NoReturn


def main() -> NoReturn:
    """Run the command line of this process, and exit."""
    # Imports and loading make hardly anything but lasting objects, which the collector would visit
    # again and again; `generate` enables it once they are there.
    gc.disable()
    import signal

    # An interrupt raised inside an import may leave its locks taken for ever, so the start is ended
    # on the spot; what can be cleaned up asks for the usual exception (`interruptible`).
    signal.signal(signal.SIGINT, lambda number, frame: _exit_interrupted())
    try:
        # Not at the top: Ctrl-C during these imports, too, must end in one line.
        import firstlight.cli.process  # noqa: F401 (the clock of the start: first of all)
        from firstlight.cli.app import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        _exit_interrupted()
    # Spares the interpreter a last walk over every object that jax made: 0.2 s of a start's time.
    gc.freeze()
    sys.exit(code)


def interruptible() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt, so that what was begun can be put in order."""
    import signal
    import threading

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit_interrupted() -> NoReturn:
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("firstlight: interrupted", file=sys.stderr, flush=True)
    # An ordinary exit waits for threads inside the compiler, which cannot be told to stop. What
    # they may be writing goes to temporary names, so nothing half-written is ever found.
    os._exit(130)
