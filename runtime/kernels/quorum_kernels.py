"""Kernels of synchronous and bounded training: deferred updates, and the orders of a chief."""

from collections.abc import Callable, Sequence

import numpy as np
from absl import logging

from runtime.errors import (
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
)
from runtime.kernels.quorum import (
    UNKNOWN,
    GradientSelection,
    LeadingQuorum,
    LedQuorum,
    LoneQuorum,
    QuorumResource,
    QuorumRules,
)
from runtime.kernels.resources import named
from runtime.kernels.staleness import StalenessBound
from runtime.state.leadership import Leadership
from runtime.task.host_kernels import Context, DeferredProgram, kernel
from runtime.tensor_spec import Array


def find_quorum(context: Context) -> QuorumResource:
    """Returns the quorum that an operation describes."""
    d = context.attrs["resource"]

    def make() -> QuorumResource:
        rules = QuorumRules(
            d["needed"],
            d["total"],
            d["timeout_secs"],
            tuple(d["tasks"]),
            d["group"],
            d["elastic"],
            d["clip_norm"],
            d["clipped"],
            d["of_rows"],
        )
        kind = LoneQuorum if d["alone"] else LeadingQuorum if d["leads"] else LedQuorum
        return kind(f"{d['name']} on {context.task}", rules, context.store.run.environment.lives)

    # The kind is for a check of the type: ``make`` makes the resource.
    return named(context, QuorumResource, make)  # type: ignore[type-abstract]


def worker_number(context: Context) -> int:
    """Returns the number of the calling worker, or minus its session for a worker without a number."""
    return int(context.attrs["worker"]) if context.attrs["worker"] is not None else -context.client


def _deferred_program(context: Context) -> DeferredProgram:
    if context.deferred is None:
        raise InternalError(f"{context.op!r} came without its update", task=context.task)
    return context.deferred


def _int64_array(*values: int) -> Array:
    return np.array(values, np.int64)


@kernel("quorum/push")
def _push_gradients(context: Context) -> Sequence[Array]:
    stamp, *gradients = context.inputs
    step, counted = find_quorum(context).push(
        worker_number(context),
        int(stamp),
        gradients,
        _deferred_program(context),
        context.cancelled,
        context.client,
    )
    return [np.asarray(step, context.attrs["dtype"]), np.asarray(counted)]


def _read_order(context: Context) -> tuple[LedQuorum, Callable[[], None], int, list[int]]:
    """Returns the parts of a chief's order.

    Returns:
        The quorum, a check that raises unless the task obeys the chief, the generation of the
        variables, and the further numbers of the order.
    """
    quorum, run = find_quorum(context), context.store.run
    if not isinstance(quorum, LedQuorum):
        raise FailedPreconditionError(
            "this quorum decides by itself, and takes no orders", task=context.task
        )
    epoch, owner, *further = (int(i) for i in context.inputs[0])

    def check() -> None:
        run.leader.check(
            Leadership(epoch, owner),
            "decide on a step",
            context.task,
            outdated=FailedPreconditionError,
        )

    return quorum, check, run.generation, further


@kernel("quorum/claim")
def _claim_task(context: Context) -> Sequence[Array]:
    def step_now() -> int:
        key = (context.attrs["step"][0], context.attrs["step"][1])
        return int(context.store.snapshot([key])[key])

    quorum, check, generation, (wanted, forget) = _read_order(context)
    session, step, last = quorum.claim(check, step_now, generation, wanted, bool(forget))
    return [
        _int64_array(session, step, UNKNOWN if last is None else last.step),
        _int64_array(*((last.norm_bits, *last.workers) if last else ())),
    ]


@kernel("quorum/gather")
def _gather_gradients(context: Context) -> Sequence[Array]:
    quorum, check, generation, (session, step, count, changes, limit_millis) = _read_order(context)
    # Numbers of an order are int64.
    limit_secs = limit_millis / 1000
    found = quorum.gather(
        session, check, generation, (step, count), context.cancelled, limit_secs, changes
    )
    return [
        _int64_array(found.step, int(found.waited_secs * 1000), found.changes),
        _int64_array(*found.workers),
        _int64_array(*found.seen),
    ]


@kernel("quorum/norm")
def _weigh_decision(context: Context) -> Sequence[Array]:
    quorum, check, generation, (session, _, step, bits, *workers) = _read_order(context)
    decision = GradientSelection(step, tuple(workers), bits)
    return [np.asarray(quorum.norm(session, check, generation, decision), np.float64)]


@kernel("quorum/commit")
def _commit_decision(context: Context) -> Sequence[Array]:
    quorum, check, generation, (session, wanted, step, bits, *workers) = _read_order(context)
    decision = GradientSelection(step, tuple(workers), bits)
    after = quorum.commit(session, check, generation, decision, wanted)
    return [np.asarray(after, np.int64)]


@kernel("quorum/counts")
def _count_gradients(context: Context) -> Sequence[Array]:
    c = find_quorum(context).counts
    return [np.asarray(n, np.int64) for n in (c.applied, c.accepted, c.dropped, c.repeated)]


@kernel("quorum/status")
def _describe_status(context: Context) -> Sequence[Array]:
    return [np.array(find_quorum(context).status().encode(), object)]


@kernel("quorum/tick")
def _count_step(context: Context) -> Sequence[Array]:
    d = context.attrs["resource"]
    bound = named(
        context,
        StalenessBound,
        lambda: StalenessBound(f"{d['name']} on {context.task}", d["bound"]),
    )
    update = _deferred_program(context)
    # The update comes before the wait, so that no gradient grows older while its worker waits.
    update.apply(context.inputs)
    step = update.step()
    try:
        bound.tick(worker_number(context), context.client, context.cancelled)
    except (CancelledError, DeadlineExceededError) as error:
        # The update is in. An error would make a caller whose connection was cut repeat it.
        logging.info("a worker's wait for slower ones ends early: %s", error)
    return [np.asarray(step, context.attrs["dtype"])]
