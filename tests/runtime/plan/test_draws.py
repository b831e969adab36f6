"""Many draws of one stage are one loop of one draw, and give the numbers that each gives by itself."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import runtime as rt
from runtime.expressions.reader import Computation, ExpressionList, read_expressions
from runtime.plan import draws
from runtime.plan.place import Device, DeviceChoices
from runtime.plan.plan import Plan
from runtime.plan.planner import make_plan

pytestmark = pytest.mark.cluster  # many compilations

MANY = draws.FEWEST + 1
PS = DeviceChoices((Device("ps", 0, "CPU", 0),), ("ps", 0), ("ps", 0))


def drawn(step: int, make: Callable[[], list[Any]], only: int | None = None) -> Any:
    """What the draws give in this step of a session, all of them or one alone."""
    with rt.Graph().as_default() as graph:
        rt.set_random_seed(7)
        tensors = make()
        with rt.Session(graph=graph) as session:
            for _ in range(step):
                values = session.run(tensors if only is None else tensors[only])
            return values


def of_many_kinds() -> list[Any]:
    low = rt.constant(np.int64(3))
    return [
        *(rt.random.normal((3, 2)) for _ in range(MANY)),
        *(rt.random.normal((3, 2), seed=seed) for seed in range(-2, MANY)),
        *(rt.random.randint((4,), 0, 5 + i % 2) for i in range(MANY)),
        *(rt.random.randint((2,), low, 2**40, jnp.int64) for _ in range(MANY)),
        *(rt.random.bernoulli(p=0.3, shape=(5,)) for _ in range(MANY)),
        *(rt.random_key() for _ in range(MANY)),
        rt.random.uniform(()),
    ]


def test_draws_together_equal_draws_alone() -> None:
    """A draw gives the same numbers whether it is made alone or among many."""
    together = drawn(2, of_many_kinds)
    assert len({value.tobytes() for value in together[: 2 * MANY + 2]}) == 2 * MANY + 2
    for place in range(2, len(together), MANY):  # one of each kind
        np.testing.assert_array_equal(together[place], drawn(2, of_many_kinds, place))


@pytest.mark.parametrize("implementation", ["rbg", "unsafe_rbg"])
def test_other_key_types_draw_the_same(implementation: str) -> None:
    """Draws of another key type give the same numbers alone and together."""

    def make() -> list[Any]:
        return [rt.random.uniform((3,)) for _ in range(MANY)]

    with jax.default_prng_impl(implementation):
        np.testing.assert_array_equal(drawn(1, make)[2], drawn(1, make, 2))


def test_key_follows_seeds_and_step() -> None:
    """A key is what JAX makes of the seeds and the number of the step."""
    expected = jax.random.fold_in(jax.random.key(7), 2**32 - 1)
    for word in (0, 0):  # the number of the step, in 2 words
        expected = jax.random.fold_in(expected, word)
    for count in (1, MANY):
        keys = drawn(
            1, lambda count=count: [rt.random_key(seed=-1, name=f"k{i}") for i in range(count)]
        )  # type: ignore[misc]
        for key in keys:
            np.testing.assert_array_equal(key, jax.random.key_data(expected))


def test_dependent_draws_stay_in_place() -> None:
    """A draw that depends on other values stays in the order of the stage."""

    def chain() -> list[Any]:
        tensors: list[Any] = [rt.random.uniform((2,))]
        for _ in range(MANY):
            tensors.append(rt.random.uniform((2,), minval=tensors[-1], maxval=tensors[-1] + 1))
        return tensors

    values = drawn(1, chain)
    for before, after in zip(values, values[1:], strict=False):
        assert ((before <= after) & (after < before + 1)).all()
        assert len(set(after - before)) == 2


def test_fed_key_changes_its_draw_only() -> None:
    """A fed key changes the numbers of its own draw only."""
    with rt.Graph().as_default() as graph:
        rt.set_random_seed(7)
        keys = [rt.random_key() for _ in range(MANY)]
        tensors = [rt.call(jax.random.uniform, key, (3,)) for key in keys]
        with rt.Session(graph=graph) as session:
            plain = session.run(tensors)
        with rt.Session(graph=graph) as session:
            fed = session.run(tensors, {keys[1]: np.array([1, 2], np.uint32)})
    np.testing.assert_array_equal(
        fed[1], jax.random.uniform(jax.random.wrap_key_data(jnp.uint32([1, 2])), (3,))
    )
    for place in (0, 2, MANY - 1):
        np.testing.assert_array_equal(fed[place], plain[place])


def plan_of(make: Callable[[], list[Any]]) -> Plan:
    with rt.Graph().as_default():
        return make_plan(make(), {}, PS)


def draws_in(plan: Plan) -> int:
    """How many equations draw bits or mix keys, those inside of loops counted once."""
    return sum(
        _count(read_expressions(call.stage.program.blob))
        for call in plan.stages
        if call.stage.program
    )


def _count(expressions: ExpressionList) -> int:
    def within(computation: Computation) -> int:
        found = 0
        for equation in computation.equations:
            found += equation.name.startswith(
                ("random_bits", "random_fold_in", "random_split", "threefry")
            )
            for attribute in equation.attributes.values():
                inner = attribute if isinstance(attribute, tuple) else (attribute,)
                found += sum(within(one) for one in inner if isinstance(one, Computation))
        return found

    return within(expressions.main)


def test_keys_need_no_loop() -> None:
    """Many keys are made together, and not one after the other."""
    plan = plan_of(lambda: [rt.random_key() for _ in range(MANY)])
    programs = [call.stage.program for call in plan.stages if call.stage.program]
    names = {e.name for p in programs for e in read_expressions(p.blob).main.equations}
    assert names and not names & {"scan", "while"}, names


def test_hundred_draws_compile_as_one() -> None:
    """A hundred small draws are compiled as one."""

    def make(count: int, shape: tuple[int, ...] = (10, 10)) -> list[Any]:
        return [rt.random.randint(shape, 0, 1201) for _ in range(count)]

    one = draws_in(plan_of(lambda: make(1)))
    assert one > 5  # the key's, and those of the draw
    assert draws_in(plan_of(lambda: make(100))) == one
    large = (draws.LARGEST // 4 + 1,)
    assert draws_in(plan_of(lambda: make(MANY, large))) > MANY  # their keys alone
