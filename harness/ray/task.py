"""The process of a task whose program is a function: ``python -m harness.ray.task FUNCTION RESULT ERROR``.

It calls the function that is pickled in the first file, and leaves what that returns or raises in
one of the others. It ends with the exit code of `harness.exit_codes` for the error.
"""

import os
import pathlib
import pickle
import sys
import traceback

from ray import cloudpickle

from harness import exit_codes


def main(function_file: pathlib.Path, result_file: pathlib.Path, error_file: pathlib.Path) -> int:
    """Calls the function. Returns the exit code."""
    function = cloudpickle.loads(function_file.read_bytes())
    try:
        result = function()
    except Exception as error:
        text = traceback.format_exc()
        # In the log of the task, too: the driver raises the error at the end of the run.
        print(text, end="", file=sys.stderr, flush=True)
        _leave_file(error_file, _pickle_error(error, text))
        return exit_codes.of_error(error).plain
    try:
        _leave_file(result_file, cloudpickle.dumps(result))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        wrong = TypeError(
            f"what the function returns cannot be pickled: {error}; return None, arrays or numbers"
        )
        _leave_file(error_file, cloudpickle.dumps(wrong))
        exit_codes.leave(exit_codes.CONFIGURATION, str(wrong))
    return exit_codes.DONE.plain


def _pickle_error(error: Exception, text: str) -> bytes:
    """Pickles an error with its traceback as a note.

    An error that cannot be pickled becomes a RuntimeError.
    """
    error.add_note(text)
    try:
        whole: bytes = cloudpickle.dumps(error)
        cloudpickle.loads(whole)
        return whole
    except Exception:  # a class of the user's: anything may be wrong with it
        named = RuntimeError(f"{type(error).__name__}: {error}")
        named.add_note(text)
        words: bytes = cloudpickle.dumps(named)
        return words


def _leave_file(path: pathlib.Path, content: bytes) -> None:
    """Writes a file whole or not at all, because the process may be killed at any moment."""
    half = path.with_suffix(".half")
    half.write_bytes(content)
    os.replace(half, path)


if __name__ == "__main__":
    sys.exit(main(*map(pathlib.Path, sys.argv[1:])))
