"""``tf.while_loop``: one operation, a loop of XLA's; ``control_flow`` says how functions become operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

import runtime as rt
from harness.tf1.loops.nests import (
    Arrays,
    Made,
    Nest,
    Unwritten,
    add_operation,
    as_tensors,
    check_callable,
    flatten_nest,
    leaf_as_tensor,
    shapes_agree,
    unflatten_nest,
    unpack_single,
)
from harness.tf1.loops.subgraph import Subgraph, make_subgraph
from harness.tf1.ops.lift import Public
from harness.tf1.ops.shapes import TensorShape
from harness.tf1.ops.static import Deferred, known_while_tracing, static, takes_shapes_only

public = Public("tf", "Conditionals and loops")


@public.add()
def while_loop(
    cond: Made,
    body: Made,
    loop_vars: Nest,
    shape_invariants: Nest = None,
    parallel_iterations: object = 10,
    back_prop: bool = True,
    swap_memory: bool = False,
    name: str | None = None,
    maximum_iterations: rt.TensorLike | None = None,
    return_same_structure: bool = False,
) -> Nest:
    """Repeats ``body`` while ``cond`` holds; gives the last ``loop_vars``.

    Its derivative costs as much as the loop where the number of turns has a limit that is known
    before the step: ``maximum_iterations``, or a condition that depends only on counters, constants
    and shapes. Else n turns cost n * n / 2 there, because each state is made anew from the
    beginning.
    """
    check_callable(cond=cond, body=body)
    leaves, structure = flatten_nest(loop_vars)
    if not leaves:
        raise ValueError("No loop variables provided")
    with rt.Graph.of(*leaves).as_default(), rt.name_scope(name or "while") as scope:
        known = [
            None
            if isinstance(leaf, Unwritten)
            else leaf_as_tensor(leaf, "tf.while_loop: loop_vars")
            for leaf in leaves
        ]
        _check_invariants(known, shape_invariants)
        # The functions of the program run once, on placeholders. The operations that they make from
        # the first placeholder on are the loop's.
        stands = [_stands_for(leaf, t) for leaf, t in zip(leaves, known, strict=True)]
        first = stands[0].op.id
        arguments = unflatten_nest(structure, stands)
        if not isinstance(arguments, list | tuple) or hasattr(arguments, "_fields"):
            arguments = [arguments]
        going = _scalar_bool(cond(*arguments))
        given = body(*arguments)
        # TensorFlow lets the body of a single loop variable return the tensor without a list.
        given = [given] if len(arguments) == 1 and not isinstance(given, list | tuple) else given
        results, _ = as_tensors(given, "the body of tf.while_loop")
        _check_turn(stands, results)
        begin = [_find_begin(leaf, t, known, stands) for leaf, t in zip(leaves, known, strict=True)]
        test = make_subgraph([going], stands, first=first, what="the condition of tf.while_loop")
        turn = make_subgraph(results, stands, first=first, what="the body of tf.while_loop")
        made = _Loop(test, turn, begin, maximum_iterations).add_to_graph(scope, back_prop)
    return unpack_single(unflatten_nest(structure, made), return_same_structure)


def _scalar_bool(going: Nest) -> rt.Tensor:
    (tensor,), _ = as_tensors(unpack_single(going, False), "the condition of tf.while_loop")
    if tensor.dtype != np.bool_:
        raise TypeError(f"the condition of tf.while_loop gives {tensor.dtype.name}, not a bool")
    if tensor.shape not in ((), None):
        raise ValueError(
            f"the condition of tf.while_loop gives the shape {tensor.shape}, not a scalar"
        )
    return tensor


def _stands_for(leaf: object, begin: rt.Tensor | None) -> rt.Tensor:
    """Returns the placeholder that stands for a loop variable in the body."""
    if begin is not None:
        return rt.placeholder(begin.dtype, begin.shape, "Identity")
    assert isinstance(leaf, Unwritten)
    # An array without rows learns the shape of a row from the first write in the body.
    leaf.written = None
    return rt.placeholder(leaf.dtype, None, "Identity")


def _find_begin(
    leaf: object,
    begin: rt.Tensor | None,
    known: Sequence[rt.Tensor | None],
    stands: Sequence[rt.Tensor],
) -> rt.Tensor:
    """Returns the first value of a loop variable; of an empty ``tf.TensorArray`` zeros of the written shape."""
    if begin is not None:
        return begin
    assert isinstance(leaf, Unwritten)
    row = leaf.written
    if row is None or row.shape is not None and None not in row.shape:
        return leaf.content()
    given = [(s, t) for s, t in zip(stands, known, strict=True) if t is not None]
    part = make_subgraph(
        [row], stands, first=stands[0].op.id, what="what is written into a tf.TensorArray"
    )
    if part.depends_on([row], takes_shapes_only)[0] - {s for s, _ in given}:
        raise ValueError(
            "tf.TensorArray: what is written depends on what was written: give element_shape"
        )
    others = make_subgraph(
        [row], [s for s, _ in given], first=stands[0].op.id, what="tf.TensorArray"
    )

    def zeros(begin: Arrays, captured: Arrays) -> jax.Array:
        shape = jax.eval_shape(others, begin, captured)[0].shape
        return jnp.zeros(shape, row.dtype)

    (like,) = add_operation(
        lambda *arrays: [zeros(*arrays)], "row", (others,), [t for _, t in given]
    )
    return leaf.like(like)


def _check_invariants(begin: Sequence[rt.Tensor | None], invariants: Nest) -> None:
    if invariants is None:
        return
    shapes = jax.tree.leaves(invariants, is_leaf=lambda leaf: isinstance(leaf, TensorShape))
    if len(shapes) != len(begin):
        raise ValueError(
            f"tf.while_loop: {len(begin)} loop_vars, but {len(shapes)} shape_invariants"
        )
    for known, shape in zip(begin, shapes, strict=True):
        if known is not None and not TensorShape(shape).is_compatible_with(known.shape):
            raise ValueError(
                f"tf.while_loop: {known.name!r} of shape {known.shape} does not fit the invariant "
                f"{shape}"
            )


def _check_turn(before: Sequence[rt.Tensor], after: Sequence[rt.Tensor]) -> None:
    if len(before) != len(after):
        raise ValueError(f"tf.while_loop: {len(before)} loop_vars, but the body gives {len(after)}")
    for one, two in zip(before, after, strict=True):
        if one.dtype != two.dtype:
            raise rt.InvalidArgumentError(
                f"tf.while_loop: the body makes {one.dtype.name} {two.dtype.name}: use tf.cast"
            )
        if not shapes_agree(one, two):
            raise _shape_changed(one.shape, two.shape)


def _shape_changed(one: object, two: object) -> ValueError:
    return rt.InvalidArgumentError(
        f"tf.while_loop: the body makes the shape {one} {two}, and XLA needs one: write into a "
        "tf.TensorArray, or into a tensor that is large enough"
    )


_Value = TypeVar("_Value")
Slopes = list[jax.Array | None]
"""Derivatives; None of what has none, such as a counter."""
_MOST_TURNS = 1_000_000
"""A loop that counts further is not counted before the step."""


class _Loop:
    """One while loop.

    The condition, ``test``, and the body, ``turn``, are functions of the loop variables. The loop
    ends after ``limit`` turns in any case.
    """

    def __init__(
        self,
        test: Subgraph,
        turn: Subgraph,
        begin: Sequence[rt.Tensor],
        limit: rt.TensorLike | None,
    ) -> None:
        self._test, self._turn, self._begin = test, turn, begin
        # A limit of shapes is known when the step is traced; a computed one is an input of the loop.
        known = not isinstance(limit, rt.Tensor | rt.Variable) or known_while_tracing(
            rt.as_tensor(limit)
        )
        self._limit = static(limit) if known else None
        self._computed_limit = None if known else limit
        self._counters = self._find_counters()

    def _find_counters(self) -> Deferred | None:
        """Finds the values that determine the number of turns before the step; None where others take part.

        ``_wanted`` names the loop variables and the captured tensors whose values they are.
        """
        counters, captured = self._test.depends_on(self._test.results, takes_shapes_only)
        # A counter may be computed from further loop variables: these join until none is added.
        while True:
            results = [r for a, r in self._turns_of() if a in counters]
            more, beside = self._turn.depends_on(results, takes_shapes_only)
            if more <= counters:
                break
            counters |= more
        begin = dict(zip(self._turn.arguments, self._begin, strict=True))
        wanted = {t: begin[t] for t in self._turn.arguments if t in counters}
        wanted |= {
            t: t for t in (*self._test.captured, *self._turn.captured) if t in captured | beside
        }
        if self._computed_limit is not None or not all(map(known_while_tracing, wanted.values())):
            return None
        self._wanted = tuple(wanted)
        found = static(list(wanted.values()))
        return found if isinstance(found, Deferred) else Deferred(found, ())

    def _turns_of(self) -> list[tuple[rt.Tensor, rt.Tensor]]:
        """Returns each loop variable with its value after one turn."""
        return list(zip(self._turn.arguments, self._turn.results, strict=True))

    def _count_turns(
        self, sources: Arrays, begin: Arrays, of_test: Arrays, of_turn: Arrays
    ) -> int | None:
        """Returns the number of turns; None when it is not known before the step."""
        if self._counters is None:
            return None
        values = self._counters.value(sources)
        # The step is being traced. Counters have values all the same, because shapes and constants
        # are known by now.
        with jax.ensure_compile_time_eval():
            known = {t: jnp.asarray(v, t.dtype) for t, v in zip(self._wanted, values, strict=True)}
            of_test = [known.get(t, a) for t, a in zip(self._test.captured, of_test, strict=True)]
            of_turn = [known.get(t, a) for t, a in zip(self._turn.captured, of_turn, strict=True)]
            turns = int(self._run_counters(known, begin, of_test, of_turn))
        assert 0 <= turns <= _MOST_TURNS
        return turns if turns < _MOST_TURNS else None

    def _run_counters(
        self, known: Mapping[rt.Tensor, jax.Array], begin: Arrays, of_test: Arrays, of_turn: Arrays
    ) -> jax.Array:
        """Counts the turns by the counters alone; of the other loop variables, ``begin``, only shapes are used."""
        counters = [(a, r) for a, r in self._turns_of() if a in known]
        names, results = [a for a, _ in counters], [r for _, r in counters]

        def beside(state: Arrays) -> Arrays:
            # A counter is computed from counters alone, so the others may keep their first values.
            now = dict(zip(names, state, strict=True))
            return [now.get(a, b) for a, b in zip(self._turn.arguments, begin, strict=True)]

        def goes_on(state: tuple[jax.Array, Arrays]) -> jax.Array:
            return (state[0] < _MOST_TURNS) & self._test(beside(state[1]), of_test)[0]

        def turn(state: tuple[jax.Array, Arrays]) -> tuple[jax.Array, Arrays]:
            return state[0] + 1, list(self._turn.some(results, beside(state[1]), of_turn))

        first = (jnp.asarray(0, np.int32), [known[a] for a in names])
        turns: jax.Array = jax.lax.while_loop(goes_on, turn, first)[0]
        return turns

    def add_to_graph(self, name: str, back_prop: bool) -> list[rt.Tensor]:
        """Returns the loop variables at the end."""
        limit = self._limit
        sources = [
            list(d.sources) if isinstance(d, Deferred) else [] for d in (self._counters, limit)
        ]

        def run(
            begin: Arrays,
            known: Sequence[Arrays],
            computed: jax.Array | None,
            of_test: Arrays,
            of_turn: Arrays,
        ) -> object:
            self._check_shapes(begin, of_turn)
            turns = self._count_turns(known[0], begin, of_test, of_turn)
            most = limit.value(known[1]) if isinstance(limit, Deferred) else limit
            # A known number of turns makes a scan, for whose derivative JAX keeps the states.
            if turns is not None:
                return self._run_counted(
                    begin, of_turn, turns if most is None else min(turns, most)
                )
            # Without any limit only a while loop of XLA's is left, whose derivative is ours.
            if most is None:
                return self._as_often()(begin, of_test, of_turn, computed)
            return self._at_most(int(most))(begin, of_test, of_turn)

        results = add_operation(
            run, name, (self._test, self._turn), list(self._begin), sources, self._computed_limit
        )
        # back_prop=False promises no derivative, so tf.gradients must give None through the loop.
        if not back_prop:
            rt.lowlevel.without_derivative(results[0])
        return results

    def _check_shapes(self, begin: Arrays, of_turn: Arrays) -> None:
        # Shapes that were unknown while the graph was built are known now.
        after = jax.eval_shape(self._turn, begin, of_turn)
        for one, two in zip(begin, after, strict=True):
            if one.shape != two.shape:
                raise _shape_changed(one.shape, two.shape)

    def _next_state(self, now: Arrays, of_turn: Arrays, turn: jax.Array) -> list[jax.Array]:
        return list(self._turn(now, self._turn.with_step(of_turn, turn)))

    def _run_counted(self, begin: Arrays, of_turn: Arrays, turns: int) -> Arrays:
        def step(now: Arrays, turn: jax.Array) -> tuple[Arrays, None]:
            return self._next_state(now, of_turn, turn), None

        # The number of the turn is mixed into random keys, so that each turn draws its own.
        last, _ = jax.lax.scan(step, list(begin), jnp.arange(turns, dtype=np.int32))
        return last

    def _run_until(
        self, begin: Arrays, of_test: Arrays, of_turn: Arrays, most: jax.Array | int | None
    ) -> tuple[jax.Array, Arrays]:
        """Returns the number of turns, and the loop variables after them."""

        def goes_on(state: tuple[jax.Array, Arrays]) -> jax.Array:
            more = self._test(state[1], of_test)[0]
            return more if most is None else more & (state[0] < most)

        def step(state: tuple[jax.Array, Arrays]) -> tuple[jax.Array, Arrays]:
            return state[0] + 1, self._next_state(state[1], of_turn, state[0])

        found: tuple[jax.Array, Arrays] = jax.lax.while_loop(
            goes_on, step, (jnp.asarray(0, np.int32), list(begin))
        )
        return found

    def _as_often(self) -> Callable[[Arrays, Arrays, Arrays, jax.Array | None], Arrays]:
        """Runs all turns; the derivative makes the state before each turn again, from the beginning.

        XLA has no stack that grows, so states cannot be kept for a number of turns that nobody
        knows: n turns cost n * n / 2 in the derivative.
        """

        @jax.custom_vjp
        def loop(begin: Arrays, of_test: Arrays, of_turn: Arrays, most: jax.Array | None) -> Arrays:
            return self._run_until(begin, of_test, of_turn, most)[1]

        def forward(
            begin: Arrays, of_test: Arrays, of_turn: Arrays, most: jax.Array | None
        ) -> tuple[Arrays, tuple[jax.Array, Arrays, Arrays]]:
            turns, last = self._run_until(begin, of_test, of_turn, most)
            return last, (turns, begin, of_turn)

        loop.defvjp(forward, self._backward)
        return loop

    def _state_after(self, turns: jax.Array, begin: Arrays, of_turn: Arrays) -> Arrays:
        """Returns the loop variables after some turns."""
        last: Arrays = jax.lax.fori_loop(
            0, turns, lambda i, now: self._next_state(now, of_turn, i), list(begin)
        )
        return last

    def _backward(
        self, saved: tuple[jax.Array, Arrays, Arrays], slopes: Arrays
    ) -> tuple[Slopes, None, Slopes, None]:
        """Carries derivatives back through all turns, the last one first."""
        turns, begin, of_turn = saved
        moved, used = _find_floating(begin), _find_floating(of_turn)

        def back(i: jax.Array, found: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
            pull = self._pull_back(turns - 1 - i, begin, of_turn, moved, used)
            of_state, of_others = pull(found[0])
            return of_state, [a + b for a, b in zip(found[1], of_others, strict=True)]

        first = ([slopes[k] for k in moved], [jnp.zeros_like(of_turn[k]) for k in used])
        of_begin, of_used = jax.lax.fori_loop(0, turns, back, first)
        return (
            _replace_at([None] * len(begin), moved, of_begin),
            None,
            _replace_at([None] * len(of_turn), used, of_used),
            None,
        )

    def _pull_back(
        self,
        turn: jax.Array,
        begin: Arrays,
        of_turn: Arrays,
        moved: Sequence[int],
        used: Sequence[int],
    ) -> Callable[..., tuple[Arrays, Arrays]]:
        """Returns the function that carries derivatives back through one turn.

        ``moved`` and ``used`` are the places in ``begin`` and ``of_turn`` that have a derivative.
        """
        now = self._state_after(turn, begin, of_turn)

        def once(some: Arrays, others: Arrays) -> list[jax.Array]:
            following = self._next_state(
                _replace_at(now, moved, some), _replace_at(of_turn, used, others), turn
            )
            return [following[k] for k in moved]

        pull: Callable[..., tuple[Arrays, Arrays]]
        _, pull = jax.vjp(once, [now[k] for k in moved], [of_turn[k] for k in used])
        return pull

    def _at_most(self, most: int) -> Callable[[Arrays, Arrays, Arrays], Arrays]:
        """Runs all turns; the derivative passes through ``most`` turns, of which the last do nothing."""

        def padded(begin: Arrays, of_test: Arrays, of_turn: Arrays) -> Arrays:
            def step(
                state: tuple[jax.Array, Arrays], turn: jax.Array
            ) -> tuple[tuple[jax.Array, Arrays], None]:
                going = state[0] & self._test(state[1], of_test)[0]
                # The turns behind the end keep the state, so that the derivative passes through
                # them unchanged.
                then = jax.lax.cond(
                    going, lambda: self._next_state(state[1], of_turn, turn), lambda: list(state[1])
                )
                return (going, then), None

            (_, last), _ = jax.lax.scan(
                step, (jnp.asarray(True), list(begin)), jnp.arange(most, dtype=np.int32)
            )
            return last

        @jax.custom_vjp
        def loop(begin: Arrays, of_test: Arrays, of_turn: Arrays) -> Arrays:
            return self._run_until(begin, of_test, of_turn, most)[1]

        # The forward pass stops at the end; only the derivative pays for all turns.
        loop.defvjp(
            lambda *inputs: jax.vjp(padded, *inputs), lambda backward, slopes: backward(slopes)
        )
        return loop


def _find_floating(arrays: Arrays) -> list[int]:
    """Returns the places of floating point arrays: JAX takes no derivative by integers."""
    return [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, np.inexact)]


def _replace_at(
    values: Sequence[_Value], places: Sequence[int], others: Sequence[_Value]
) -> list[_Value]:
    """Returns ``values``, with others in some places."""
    found = list(values)
    for place, other in zip(places, others, strict=True):
        found[place] = other
    return found
