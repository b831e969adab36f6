"""Moving averages of variables, which the update of a variable computes on its ps: nothing more crosses the wire."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import runtime as rt
from harness.optimizers.optimizer import Optimizer, WrappedOptimizer


class EmaState(NamedTuple):
    """The state of an average for one variable: the number of updates of the variable, and its average."""

    steps: jax.Array
    average: optax.Params


class ExponentialMovingAverage:
    """The average of each variable over its last updates: ``average = decay * average + (1 - decay) * value``.

        ema = harness.ExponentialMovingAverage(0.999)
        optimizer = harness.Optimizer(ema.after(optax.adam(1e-3)))
        train_op = optimizer.minimize(loss, global_step)
        accuracy = rt.call(accuracy_fn, ema.variables(optimizer, params), images, labels)

    Checkpoints hold the average under names such as ``mlp/w1/ema/average``. An evaluator reads the
    average by ``harness.load_pytree(path, like=params, slot="ema/average")``. The average of a type
    narrower than float32, such as bfloat16, is float32: in few bits the average would stand still.

    Args:
        decay: weight of the old average, between 0 and 1.
        warm_up: True for a smaller decay at the beginning, ``(1 + n) / (10 + n)`` at update n, so
            that the average soon forgets the first values. TensorFlow does so with ``num_updates``.
        name: first part of the name in checkpoints: small letters, digits and ``_``. Two averages
            of one optimizer need two names.

    Raises:
        InvalidArgumentError: ``decay`` is not between 0 and 1, or ``name`` has other characters.
    """

    def __init__(self, decay: float = 0.999, *, warm_up: bool = True, name: str = "ema") -> None:
        if not (name.isidentifier() and name.islower()):
            raise rt.InvalidArgumentError(
                f"the name of a moving average has small letters, digits and _ only, not {name!r}"
            )
        self._name = name
        # The name of the slot is made of the name of the class, so each average has a class.
        self._state: type[EmaState] = type(f"{name}State", (EmaState,), {})
        if not 0 <= decay <= 1:
            raise rt.InvalidArgumentError(
                f"the decay of a moving average is between 0 and 1, not {decay}"
            )
        self._decay = decay
        self._warm_up = warm_up

    def after(
        self, transformation: optax.GradientTransformation
    ) -> optax.GradientTransformationExtraArgs:
        """Returns ``transformation``, followed by the average of the new value of the variable."""
        averaged = optax.GradientTransformationExtraArgs(self._init_state, self._update_average)
        return optax.chain(transformation, averaged)

    def variables(self, optimizer: Optimizer | WrappedOptimizer, params: object) -> Any:
        """Returns the averages of a pytree of variables that ``optimizer`` updates, in its structure and dtypes.

        Raises:
            InvalidArgumentError: A variable has no average, or two averages have one name; the
                error has the name.
        """

        def find(variable: rt.Variable) -> rt.Variable | rt.Tensor:
            slot = optimizer.get_slot(variable, f"{self._name}/average")
            # A second slot of one name has a `_` at its end.
            if optimizer.get_slot(variable, f"{self._name}/average_") is not None:
                raise rt.InvalidArgumentError(
                    f"two moving averages of one optimizer are called {self._name!r}: give one of "
                    "them another name="
                )
            if slot is None:
                raise rt.InvalidArgumentError(
                    f"{variable.spec.name!r} has no moving average: give Optimizer ema.after(...), "
                    "and minimize first"
                )
            if slot.dtype == variable.dtype:
                return slot
            narrow: rt.Tensor = rt.call(
                lambda average: average.astype(variable.dtype), slot, name="narrow"
            )
            return narrow

        return jax.tree.map(find, params)

    def _init_state(self, params: optax.Params) -> EmaState:
        def wide(value: jax.Array) -> jax.Array:
            is_float = jnp.issubdtype(value.dtype, jnp.floating)
            return jnp.asarray(
                value, jnp.promote_types(value.dtype, jnp.float32) if is_float else value.dtype
            )

        return self._state(jnp.zeros((), jnp.int32), jax.tree.map(wide, params))

    def _update_average(
        self,
        updates: optax.Updates,
        state: EmaState,
        params: optax.Params | None = None,
        **_: object,
    ) -> tuple[optax.Updates, EmaState]:
        done = state.steps.astype(jnp.float32)
        decay = (
            jnp.minimum(self._decay, (1 + done) / (10 + done))
            if self._warm_up
            else jnp.float32(self._decay)
        )

        def moved(average: jax.Array, value: jax.Array) -> jax.Array:
            return average + ((1 - decay) * (value.astype(average.dtype) - average)).astype(
                average.dtype
            )

        # Of the value after this update, which is applied only later.
        average = jax.tree.map(moved, state.average, optax.apply_updates(params, updates))
        return updates, self._state(optax.safe_increment(state.steps), average)
