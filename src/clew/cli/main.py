"""The console script: runs a command and turns whatever comes of it into a line and an exit code.

0: done. 1: a fault (ours, or the machine's). 2: bad input. 130: interrupted.
"""

from __future__ import annotations

import io
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from clew.errors import Interrupted, RunFailed, UserError

FAULTS = "faults.log"


def main() -> None:
    """Runs ``clew`` with the arguments of the process and exits."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name that the console has no letters for must not end a run
            stream.reconfigure(errors="backslashreplace")
    # Ray is to stop this job by Ctrl-C's signal (see cloud/jobs.py); where Ray was started in the background of a
    # script, its children are told to ignore it.
    if os.environ.get("RAY_JOB_STOP_SIGNAL") == "SIGINT":
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Runs one command; returns its exit code. No traceback for what the user can mend."""
    again = shlex.join(["clew", *(argument for argument in arguments if argument != "--fresh")])
    try:
        code = _call(arguments)
    except UserError as error:
        return _say(f"error: {error}", 2)
    except RunFailed as failure:
        return _say(f"failed: {failure}; what was saved is whole, to go on: {again}", 1)
    except Interrupted as stopped:
        return _say(f"stopped after step {stopped.step}; all of it is saved, to go on: {again}", 130)
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        return _fault(error)
    if code == 130:  # typer makes this of a KeyboardInterrupt
        return _say(f"stopped at once; what was saved before is whole, to go on: {again}", 130)
    return code if isinstance(code, int) else 0


def _call(arguments: Sequence[str]) -> object:
    # Imported here: these imports take a moment, in which Ctrl-C must not end in a traceback either.
    from typer.exceptions import TyperException

    from clew.cli.app import app, place

    place.run_dir = None
    try:
        return app(list(arguments), prog_name="clew", standalone_mode=False)
    except TyperException as error:  # an unknown command or option, a value of the wrong kind
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "clew"
        raise UserError(f"{error.format_message()} (see {command} --help)") from error


def _say(text: str, code: int) -> int:
    print("clew: " + " ".join(text.split()), file=sys.stderr)
    return code


def _fault(error: Exception) -> int:
    """One line on the console; the traceback goes where the run is, if there is one."""
    from clew.checkpoint.staging import write_error
    from clew.cli.app import place

    folder = place.run_dir
    if (full := write_error(error, folder or Path.cwd())) is not None:  # met where nothing else catches it
        return _say(f"error: {full}", 2)
    if folder is not None and isinstance(error, OSError) and _inside(error.filename, folder):
        return _say(
            f"error: {error.filename}: {error.strerror}; mend that, then run the same command again "
            "(nothing that was saved is lost)",
            2,
        )
    summary = f"fault: {type(error).__name__}: {error}"
    details = "".join(traceback.format_exception(error))
    # Writing can fail for the same reason as the run did.
    if folder is not None and folder.is_dir() and (path := _note_down(folder, details)) is not None:
        return _say(f"{summary} (the traceback is in {path})", 1)
    print(details, file=sys.stderr, end="")
    return _say(summary, 1)


def _inside(name: object, folder: Path) -> bool:
    return isinstance(name, str) and Path(os.path.abspath(name)).is_relative_to(os.path.abspath(folder))


def _note_down(folder: Path, details: str) -> Path | None:
    path = folder / FAULTS
    try:
        with path.open("a", encoding="utf-8") as log:
            log.write(f"--- {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC\n{details}\n")
    except OSError as error:
        print(f"clew: {path} could not be written ({error})", file=sys.stderr)
        return None
    return path
