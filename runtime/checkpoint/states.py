"""Small named states of the program around a task (position in the data, ...) that ride in checkpoints."""

from collections.abc import Callable

from absl import logging

from runtime import concurrency

_lock = concurrency.Lock()
_states: dict[tuple[str, str], Callable[[], bytes]] = {}


def register_state(name: str, get: Callable[[], bytes] | None, *, task: str = "") -> None:
    """Registers a state of this process for checkpoints.

    Args:
        name: name of the state, unique on the task.
        get: returns the state as bytes; called from another thread at each save. None removes the
            state.
        task: when several tasks share the process, ``/job:worker/task:1``, or where tasks of two
            clusters have one name the ``target`` of the server; by default whichever task is asked.

    Examples:
        >>> register_state("position", lambda: b"17")
        >>> task_states("/job:worker/task:0")
        {'position': b'17'}
        >>> register_state("position", None)
    """
    with _lock:
        if get is None:
            _states.pop((task, name), None)
        else:
            _states[task, name] = get


def task_states(task: str, address: str = "") -> dict[str, bytes]:
    """Returns the states of a task of this process as they are now; a state that fails is logged and left out.

    Args:
        task: name of the task.
        address: address of the task's server, which distinguishes tasks of two clusters.
    """
    with _lock:
        # The functions are called without the lock, as a function may register another state.
        chosen = {
            name: get
            for (of, name), get in _states.items()
            if of in ("", task, f"grpc://{address}")
        }
    found = {}
    for name, get in chosen.items():
        try:
            # The function belongs to the program, and its error must not cost the checkpoint.
            found[name] = get()
        except Exception as error:
            logging.error(
                "the state %r of %s is not in this checkpoint: %s: %s",
                name,
                task,
                type(error).__name__,
                error,
            )
    return found
