"""harness.Optimizer against plain optax: what it may be given, and what it makes of it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import harness
import runtime as rt

pytestmark = pytest.mark.cluster

STEPS = 4
START = {"a": np.array([1.0, -2.0], np.float32), "b": np.array([[3.0], [0.5]], np.float32)}


def _loss(params: Any) -> Any:
    return jnp.sum(params["a"] ** 2) + jnp.sum(params["b"] ** 4)


def _by_optax(transformation: optax.GradientTransformation) -> Any:
    params = jax.tree.map(jnp.asarray, START)
    state = transformation.init(params)
    for _ in range(STEPS):
        change, state = transformation.update(jax.grad(_loss)(params), state, params)
        params = optax.apply_updates(params, change)
    return params


def _trained(*args: Any, **kwargs: Any) -> Any:
    with rt.Graph().as_default():
        params = rt.variables(START, name="model")
        train = harness.Optimizer(*args, **kwargs).minimize(rt.call(_loss, params))
        with rt.Session() as session:
            session.run(rt.global_variables_initializer())
            for _ in range(STEPS):
                session.run(train)
            return session.run(params)


CLIP = optax.clip_by_global_norm(1.0)


def _by_rank(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: "matrix" if leaf.ndim > 1 else "rest", tree)


def _of_one_leaf(leaf: Any) -> str:
    return "matrix" if leaf.ndim > 1 else "rest"


@pytest.mark.parametrize(
    ("transformation", "part", "advice"),
    [
        (
            optax.chain(optax.scale_by_adam(), CLIP, optax.scale(-1e-3)),
            "clip_by_global_norm",
            "as before_push.*; or put it first in the chain",
        ),
        (
            optax.chain(optax.adam(1e-3), optax.chain(optax.scale(1.0), CLIP)),
            "clip_by_global_norm",
            "as before_push",
        ),
        (optax.chain(CLIP, optax.adam(1e-3), CLIP), "clip_by_global_norm", "as before_push"),
        (
            optax.named_chain(("clip", CLIP), ("adam", optax.adam(1e-3))),
            "clip_by_global_norm",
            "as before_push",
        ),
        (
            optax.masked(CLIP, lambda tree: jax.tree.map(lambda x: x.ndim > 3, tree)),
            "clip_by_global_norm",
            "as before",
        ),
        (
            optax.multi_transform(
                {"matrix": optax.chain(CLIP, optax.sgd(0.1)), "rest": optax.sgd(0.1)}, _by_rank
            ),
            "clip_by_global_norm",
            "as before_push",
        ),
        (
            optax.multi_transform(
                {"matrix": optax.chain(CLIP, optax.sgd(0.1)), "rest": optax.sgd(0.1)}, _of_one_leaf
            ),
            "clip_by_global_norm",
            "as before_push",
        ),
        (
            optax.MultiSteps(optax.chain(CLIP, optax.sgd(0.1)), 2).gradient_transformation(),
            "clip_by_global_norm",
            "as before_push",
        ),
        (
            optax.inject_hyperparams(lambda rate: optax.chain(CLIP, optax.sgd(rate)))(rate=0.1),
            "inject_hyperparams",
            "must be a stateless before_push",
        ),
        (
            optax.apply_if_finite(optax.adam(1e-3), 3),
            "apply_if_finite",
            "must be a stateless before_push",
        ),
        (optax.normalize_by_update_norm(), "normalize_by_update_norm", "as before_push"),
        (optax.contrib.prodigy(1.0), "prodigy", "must be a stateless before_push"),
    ],
    ids=lambda value: None if not isinstance(value, str) else value.split()[0],
)
def test_global_transformation_is_refused_by_name(
    transformation: optax.GradientTransformation, part: str, advice: str
) -> None:
    """A transformation that needs all gradients at once is refused by name, with advice."""
    with pytest.raises(rt.InvalidArgumentError, match=f"^mine: with {part} the update .*{advice}"):
        harness.Optimizer(transformation, name="mine")


def test_dependence_through_state_is_refused() -> None:
    """A transformation whose state carries one variable's update to another is refused."""

    def init(params: Any) -> Any:
        return [jnp.ones(()), jnp.ones(())]

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        scaled = jax.tree.map(lambda u: u / state[1], updates)
        return scaled, [optax.tree.norm(updates), state[0]]

    with pytest.raises(
        rt.InvalidArgumentError, match="the update of a variable depends on other variables"
    ):
        harness.Optimizer(optax.GradientTransformation(init, update))


@pytest.mark.parametrize(
    "transformation",
    [
        optax.adamw(1e-2, mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)),
        optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
        optax.multi_transform({"matrix": optax.adam(1e-2), "rest": optax.sgd(0.1)}, _by_rank),
        optax.chain(optax.clip_by_block_rms(0.5), optax.adaptive_grad_clip(0.1), optax.lamb(1e-2)),
        optax.contrib.muon(1e-2),
        optax.contrib.schedule_free_adamw(1e-2),
    ],
    ids=["adamw", "multisteps", "labels", "lamb", "muon", "schedule_free"],
)
def test_separable_transformations_equal_optax(
    transformation: optax.GradientTransformation,
) -> None:
    """A transformation that treats each variable alone gives the values of plain optax."""
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-7),
        _trained(transformation),
        _by_optax(transformation),
    )


def test_global_clipping_works_before_push() -> None:
    """Clipping by the global norm as before_push gives the values of plain optax."""
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5),
        _trained(optax.adam(1e-2), before_push=CLIP),
        _by_optax(optax.chain(CLIP, optax.adam(1e-2))),
    )


@pytest.mark.parametrize(
    "transformation",
    [
        CLIP,
        optax.chain(CLIP, optax.adam(1e-2)),
        optax.chain(optax.chain(CLIP, optax.add_decayed_weights(0.1)), optax.sgd(0.1, 0.9)),
        optax.with_extra_args_support(optax.chain(CLIP, optax.sgd(0.1))),
    ],
    ids=["alone", "adam", "nested", "wrapped"],
)
def test_clip_in_front_equals_optax(
    transformation: optax.GradientTransformation,
) -> None:
    """Clipping by the global norm at the front of a chain gives the values of plain optax."""
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6),
        _trained(transformation),
        _by_optax(transformation),
    )


def test_extra_arguments_reach_the_transformation() -> None:
    """Extra arguments reach the transformation when the optimizer is checked and when a step runs."""
    with rt.Graph().as_default():
        value = rt.placeholder(np.float32, [])
        with pytest.raises(rt.InvalidArgumentError, match="with scale_by_polyak the update"):
            harness.Optimizer(optax.polyak_sgd(), extra_args={"value": value})
        plateau = optax.chain(optax.contrib.reduce_on_plateau(), optax.sgd(0.1))
        v = rt.Variable(1.0)
        train = harness.Optimizer(plateau, extra_args={"value": value}).minimize(v * v)
        with rt.Session() as session:
            session.run(rt.global_variables_initializer())
            session.run(train, {value: 1.0})
            assert session.run(v) == pytest.approx(0.8)


def test_pairs_may_come_from_zip() -> None:
    """``zip(gradients, variables)`` is taken as a list of the pairs is."""
    with rt.Graph().as_default(), rt.Session() as session:
        variable = rt.Variable(np.float32(3))
        gradients = rt.gradients(variable * variable, [variable])
        train = harness.Optimizer(optax.sgd(0.5)).apply_gradients(
            zip(gradients, [variable], strict=True)
        )
        session.run(rt.global_variables_initializer())
        session.run(train)
        assert session.run(variable) == 0


@pytest.mark.parametrize(
    ("transformation", "expected"),
    [
        (optax.sgd(0.5), [1 - 0.5 * 1 - 0.5 * 2, 0.0]),
        (optax.sgd(0.5, momentum=0.5), [1 - 0.5 * 1 - 0.5 * (0.5 * 1 + 2), 0.0]),
    ],
    ids=["sgd", "momentum"],
)
def test_two_pairs_of_one_variable_add(
    transformation: optax.GradientTransformation, expected: list[float]
) -> None:
    """A variable that stands in two pairs receives the sum of both gradients."""
    with rt.Graph().as_default():
        v, w = rt.Variable(1.0, name="v"), rt.Variable(1.0, name="w")
        one, two = rt.constant(1.0), rt.constant(2.0)
        train = harness.Optimizer(transformation).apply_gradients([(one, v), (two, w), (two, v)])
        with rt.Session() as session:
            session.run(rt.global_variables_initializer())
            session.run(train)
            assert session.run([v, w]) == expected


def test_random_keys_advance_and_differ() -> None:
    """Random keys in the state advance with each step, differ between variables and repeat in every
    run.
    """

    def noise(draws: int) -> tuple[Any, list[str]]:
        with rt.Graph().as_default():
            v, w = (rt.Variable(np.zeros(3, np.float32), name=name) for name in "vw")
            optimizer = harness.Optimizer(
                optax.chain(optax.add_noise(1.0, 0.0, jax.random.key(7)), optax.scale(-1.0))
            )
            zeros = rt.constant(np.zeros(3, np.float32))
            train = optimizer.apply_gradients([(zeros, v), (zeros, w)])
            with rt.Session() as session:
                session.run(rt.global_variables_initializer())
                for _ in range(draws):
                    session.run(train)
                return session.run([v, w]), optimizer.get_slot_names()

    (once, other), slots = noise(1)
    twice, _ = noise(2)
    assert slots == ["add_noise/count", "add_noise/rng_key"]
    assert np.all(once != 0) and np.all(once != other)
    second = twice[0] - once
    assert np.all(second != 0) and not np.allclose(second, once)
    np.testing.assert_array_equal(noise(1)[0][0], once)  # the same in every run


def test_noisy_sgd_trains() -> None:
    """optax.noisy_sgd trains to nearly the values of plain SGD."""
    found = _trained(optax.noisy_sgd(0.05, eta=1e-6, key=jax.random.key(0)))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=1e-2), found, _by_optax(optax.sgd(0.05))
    )


# -- masks and labels ------------------------------------------------------------------------------------------

DECAY = optax.adamw(0.1, weight_decay=0.5, mask={"a": False, "b": True})
GROUPS = {"slow": optax.sgd(0.01, momentum=0.9), "fast": optax.adam(0.1)}


def _labelled(**options: Any) -> Any:
    with rt.Graph().as_default():
        params = rt.variables(START, name="model")
        optimizer = harness.Optimizer(
            options.pop("transformation"), params=options.pop("params", lambda p: p)(params)
        )
        train = optimizer.minimize(rt.call(_loss, params))
        with rt.Session() as session:
            session.run(rt.global_variables_initializer())
            for _ in range(STEPS):
                session.run(train)
            return session.run(params), sorted(v.spec.name for v in optimizer.variables())


@pytest.mark.parametrize(
    "transformation",
    [
        DECAY,
        optax.masked(optax.scale_by_adam(), {"a": True, "b": False}),
        optax.multi_transform(GROUPS, {"a": "slow", "b": "fast"}),
        optax.multi_transform(GROUPS, harness.by_name({"^a$": "fast", "": "slow"})),
        optax.chain(
            optax.add_decayed_weights(0.1, harness.by_name({"b": True, "": False})), optax.sgd(0.1)
        ),
        optax.adamw(0.1, mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree)),
    ],
    ids=["adamw", "masked", "multi_transform", "labels by name", "mask by name", "mask by rank"],
)
def test_masks_and_labels_equal_optax(
    transformation: optax.GradientTransformation,
) -> None:
    """Masked and labelled transformations give the values of plain optax."""
    expected = _by_optax(transformation)
    found, _ = _labelled(transformation=transformation)
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5), found, expected
    )


def test_masked_slots_are_named_by_state() -> None:
    """Slots under masks are named by the optimizer's state, not by the tree of labels."""
    _, slots = _labelled(transformation=optax.multi_transform(GROUPS, {"a": "slow", "b": "fast"}))
    assert [s for s in slots if s.startswith("model/a")] == [
        "model/a/adam/count",
        "model/a/trace/trace",
    ]
    assert [s for s in slots if s.startswith("model/b")] == [
        "model/b/adam/count",
        "model/b/adam/mu",
        "model/b/adam/nu",
    ]


def test_listed_variables_match_by_name() -> None:
    """Rules of by_name match the variables of a list by their names."""
    mask = optax.masked(optax.set_to_zero(), harness.by_name({"model/a": True, "": False}))
    found, _ = _labelled(
        transformation=optax.chain(optax.sgd(0.1), mask),
        params=lambda params: [params["a"], params["b"]],
    )
    np.testing.assert_array_equal(found["a"], START["a"])
    assert not np.array_equal(found["b"], START["b"])


def test_mask_without_tree_is_explained() -> None:
    """A mask whose params are missing or do not fit is refused, and the error says what to pass."""
    with rt.Graph().as_default():
        params = rt.variables(START, name="model")
        loss = rt.call(_loss, params)
        with pytest.raises(
            rt.InvalidArgumentError,
            match=r"'model/a': each variable is .*give Optimizer\(params=\.\.\.\)",
        ):
            harness.Optimizer(DECAY).minimize(loss)
        with pytest.raises(rt.InvalidArgumentError, match="masks and labels must fit params"):
            harness.Optimizer(DECAY, params={"a": params["a"], "c": params["b"]})
        with pytest.raises(
            rt.InvalidArgumentError, match="variable 'model/b' is trained but is not in the params"
        ):
            harness.Optimizer(optax.adam(0.1), params={"a": params["a"]}).minimize(loss)
        with pytest.raises(rt.InvalidArgumentError, match=r"params\['x'\] is no variable but 3"):
            harness.Optimizer(optax.adam(0.1), params={"x": 3})
        with pytest.raises(rt.InvalidArgumentError, match="by_name: no rule is for 'b'"):
            harness.Optimizer(optax.adamw(0.1, mask=harness.by_name({"a": True})), params=params)


def test_group_norm_clipping_is_refused() -> None:
    """Clipping by the norm of a labelled group is refused."""
    groups = {"slow": optax.chain(CLIP, optax.sgd(0.1)), "fast": optax.sgd(0.1)}
    with pytest.raises(rt.InvalidArgumentError, match="with clip_by_global_norm"):
        harness.Optimizer(optax.multi_transform(groups, {"a": "slow", "b": "fast"}))


def test_slots_lie_beside_their_variables() -> None:
    """A slot lies on its variable's device, whatever device scope is open."""
    with rt.Graph().as_default():
        with rt.device("/job:ps/task:1"):
            v = rt.Variable(np.ones(2, np.float32), name="v")
        anywhere = rt.Variable(np.ones(2, np.float32), name="anywhere")
        optimizer = harness.Optimizer(optax.adam(0.1), name="adam")
        with rt.device("/job:worker/task:0/cpu:0"):
            optimizer.minimize(rt.numpy.sum(v + anywhere))
        assert {
            slot.device for slot in optimizer.variables() if slot.spec.name.startswith("v/")
        } == {"/job:ps/task:1"}
        assert {slot.device for slot in optimizer.variables()} == {"/job:ps/task:1", ""}
