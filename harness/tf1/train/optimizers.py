"""``tf.train.*Optimizer``: harness.Optimizer with TensorFlow's arguments, and learning rates that may be tensors.

The update rules are those of TensorFlow's documentation, from optax where it has the same one. A
learning rate given as a tensor (a decay of the global step, a placeholder) is computed on the
worker and travels with the gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

import runtime as rt
from harness.checkpoints.names import FORMER_KEYS
from harness.coordinator import Coordinator
from harness.optimizers import optimizer, sync_replicas
from harness.tf1.graph.scopes import get_variable_scope
from harness.tf1.ops.lift import Public, is_tensor
from harness.training.run.hooks.base import SessionRunHook

_T = TypeVar("_T")

public = Public("tf.train")
public.update({"Optimizer": optimizer.Optimizer})


class _Minimize:
    """TensorFlow's arguments of ``minimize`` and ``compute_gradients``, in front of a class of the harness."""

    def minimize(
        self,
        loss: rt.Tensor,
        global_step: rt.Variable | None = None,
        var_list: Sequence[rt.Variable] | None = None,
        gate_gradients: object = None,
        aggregation_method: object = None,
        colocate_gradients_with_ops: bool = False,
        name: str | None = None,
        grad_loss: rt.TensorLike | None = None,
    ) -> rt.Operation:
        """Does as in the harness; gating, aggregation and colocation are what they are."""
        pairs = self.compute_gradients(loss, var_list, grad_loss=grad_loss)
        return self.apply_gradients(pairs, global_step, name)  # type: ignore[attr-defined,no-any-return]

    def compute_gradients(
        self,
        loss: rt.Tensor,
        var_list: Sequence[rt.Variable] | None = None,
        gate_gradients: object = None,
        aggregation_method: object = None,
        colocate_gradients_with_ops: bool = False,
        grad_loss: rt.TensorLike | None = None,
    ) -> list[tuple[rt.Tensor | None, rt.Variable]]:
        """Does as in the harness; ``grad_loss`` is the gradient of ``loss`` to start from."""
        if grad_loss is None:
            # TensorFlow takes the gradient of the sum of a loss that is no scalar.
            if loss.shape:
                loss = rt.numpy.sum(loss)
            return super().compute_gradients(loss, var_list)  # type: ignore[misc,no-any-return]
        return _gradients_from(loss, var_list, grad_loss)


class _Optimizer(_Minimize, optimizer.Optimizer):  # type: ignore[misc]
    """The base of TensorFlow's optimizers: the arguments of ``minimize`` and the old names of the slots.

    Args:
        name: of the optimizer.
        learning_rate: a number, a tensor, or a function that gives one.
        before: transformations in front of the learning rate.
        after: transformations behind it.
    """

    GATE_NONE, GATE_OP, GATE_GRAPH = 0, 1, 2
    _slot_names: dict[str, str] = {}

    def __init__(
        self,
        name: str,
        learning_rate: Any,
        *before: optax.GradientTransformation,
        after: Sequence[optax.GradientTransformation] = (),
    ) -> None:
        rate, extra = _scale_by_rate(learning_rate)
        parts = [*before, rate, *after]
        # A chain of one would give the state, and with it every checkpoint, another structure.
        whole = optax.chain(*parts) if len(parts) > 1 else rate
        super().__init__(whole, extra_args=extra, name=name)

    def get_slot(self, variable: rt.Variable, name: str) -> rt.Variable | None:
        """Returns the slot variable, by TensorFlow's name ("momentum", "m" ...) or the harness's; None without one."""
        return super().get_slot(variable, self._slot_names.get(name, name))

    def get_slot_names(self) -> list[str]:
        """Returns TensorFlow's names of the slots, without a count that TensorFlow has no slot for."""
        made = super().get_slot_names()
        return sorted(name for name, state in self._slot_names.items() if state in made)

    def _slots_of(self, variable: rt.Variable) -> dict[str, rt.Variable]:
        made = variable not in self._slots
        slots = super()._slots_of(variable)
        part, graph = variable.save_slice_info, variable.graph
        for name, slot in slots.items() if made else ():
            # Checkpoints of 0.1 have the names of the state, those of a second optimizer with a
            # number, which the graph counts again. Parts of one array share a key.
            with rt.name_scope(None):
                former = graph.unique_name(f"former/{variable.spec.name}/{name}")
            owner = variable.spec.name if part is None else part.key
            key = f"{owner}/{former.removeprefix(f'former/{variable.spec.name}/')}"
            graph.add_to_collection(FORMER_KEYS, (slot, key))
        return slots

    def _name_slot(self, variable: rt.Variable, name: str) -> str:
        # TensorFlow names slots after the optimizer and numbers them, below the open scope of
        # variables.
        parts = [get_variable_scope().name, variable.spec.name, self.name]
        if name not in self._slot_names.values():
            parts.append(name.rpartition("/")[2])
        return "/".join(part for part in parts if part)

    def get_name(self) -> str:
        """Returns the name it was given."""
        return self.name


def _gradients_from(
    loss: rt.Tensor, var_list: Sequence[rt.Variable] | None, grad_loss: rt.TensorLike | None
) -> list[tuple[rt.Tensor | None, rt.Variable]]:
    with loss.graph.as_default():
        variables = list(
            rt.trainable_variables() if var_list is None else jax.tree.leaves(var_list)
        )
    return list(zip(rt.gradients(loss, variables, grad_loss), variables, strict=True))


class _Scaled(NamedTuple):
    """The state of a scaling by a tensor: none."""


def scale_by_tensor(key: str, sign: float) -> optax.GradientTransformationExtraArgs:
    """Scales updates by ``sign`` times the extra argument ``key`` of the update.

    Args:
        key: name of the extra argument, a scalar.
        sign: 1 or -1.
    """

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        rate = extra[key]
        return jax.tree.map(lambda u: u * (sign * rate).astype(u.dtype), updates), state

    return optax.GradientTransformationExtraArgs(lambda params: _Scaled(), update)


def _scale_by_rate(
    learning_rate: Any, sign: float = -1.0
) -> tuple[optax.GradientTransformation, dict[str, Any]]:
    """Returns a transformation that scales by the learning rate, and the tensors that each step needs."""
    value = learning_rate() if callable(learning_rate) else learning_rate
    # A rate that is a tensor is computed in each step, so it reaches the update as an extra
    # argument.
    if is_tensor(value):
        return scale_by_tensor("learning_rate", sign), {"learning_rate": value}
    return optax.scale(sign * _rounded(value)), {}


def _rounded(number: float) -> float:
    """Returns a number of an optimizer as TensorFlow keeps it, in float32: 1 - 0.999 is then 0.00100005."""
    return float(np.float32(number))


@public.add()
class GradientDescentOptimizer(_Optimizer):
    """``v -= learning_rate * g``: optax.sgd."""

    def __init__(
        self, learning_rate: rt.TensorLike, use_locking: bool = False, name: str = "GradientDescent"
    ) -> None:
        super().__init__(name, learning_rate)


@public.add()
class MomentumOptimizer(_Optimizer):
    """``a = momentum * a + g; v -= learning_rate * a``: optax.trace, slot "momentum"."""

    _slot_names = {"momentum": "trace/trace"}

    def __init__(
        self,
        learning_rate: rt.TensorLike,
        momentum: float,
        use_locking: bool = False,
        name: str = "Momentum",
        use_nesterov: bool = False,
    ) -> None:
        super().__init__(name, learning_rate, optax.trace(_rounded(momentum), use_nesterov))


@public.add()
class AdagradOptimizer(_Optimizer):
    """``a += g * g; v -= learning_rate * g / sqrt(a)``: optax.scale_by_rss, slot "accumulator"."""

    _slot_names = {"accumulator": "rss/sum_of_squares"}

    def __init__(
        self,
        learning_rate: rt.TensorLike,
        initial_accumulator_value: float = 0.1,
        use_locking: bool = False,
        name: str = "Adagrad",
    ) -> None:
        if initial_accumulator_value <= 0:
            raise ValueError(
                f"initial_accumulator_value must be positive: {initial_accumulator_value}"
            )
        super().__init__(name, learning_rate, optax.scale_by_rss(initial_accumulator_value, 0.0))


class AdamState(NamedTuple):
    """The state of ``scale_by_adam``: int32 count of updates, and the two moments in the variable's shape."""

    count: Any
    m: Any
    v: Any


def scale_by_adam(beta1: float, beta2: float, epsilon: float) -> optax.GradientTransformation:
    """Scales as Adam in TensorFlow 1: epsilon is added before the second moment is corrected ("epsilon hat").

    ``sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + epsilon)``; optax.scale_by_adam adds
    epsilon after it. See section 2 of Kingma and Ba, Adam: A Method for Stochastic Optimization
    (2015), just before 2.1.
    """

    def init(params: Any) -> AdamState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return AdamState(jnp.zeros((), jnp.int32), zeros, zeros)

    def update(updates: Any, state: AdamState, params: Any = None) -> tuple[Any, AdamState]:
        count = state.count + 1
        m = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, state.m, updates)
        v = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * g * g, state.v, updates)

        def step(m: Any, v: Any) -> Any:
            t = count.astype(m.dtype)
            return jnp.sqrt(1 - beta2**t) / (1 - beta1**t) * m / (jnp.sqrt(v) + epsilon)

        return jax.tree.map(step, m, v), AdamState(count, m, v)

    return optax.GradientTransformation(init, update)


@public.add()
class AdamOptimizer(_Optimizer):
    """Adam, slots "m" and "v"."""

    _slot_names = {"m": "adam/m", "v": "adam/v"}

    def __init__(
        self,
        learning_rate: rt.TensorLike = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        use_locking: bool = False,
        name: str = "Adam",
    ) -> None:
        numbers = map(_rounded, (beta1, beta2, epsilon))
        super().__init__(name, learning_rate, scale_by_adam(*numbers))


class RStdDevState(NamedTuple):
    """The state of ``scale_by_stddev``: optax's moments, in TensorFlow's order, which numbers the slots."""

    nu: Any
    mu: Any


def scale_by_stddev(decay: float, epsilon: float) -> optax.GradientTransformation:
    """Scales as optax.scale_by_stddev with a mean square that begins at 1."""
    whole = optax.scale_by_stddev(decay, epsilon, 1.0)

    def init(params: Any) -> RStdDevState:
        made = whole.init(params)
        return RStdDevState(made.nu, made.mu)

    def update(updates: Any, state: RStdDevState, params: Any = None) -> tuple[Any, RStdDevState]:
        before = optax.ScaleByRStdDevState(mu=state.mu, nu=state.nu)
        changed, made = whole.update(updates, before, params)
        return changed, RStdDevState(made.nu, made.mu)

    return optax.GradientTransformation(init, update)


@public.add()
class RMSPropOptimizer(_Optimizer):
    """``s = decay * s + (1 - decay) * g * g; a = momentum * a + learning_rate * g / sqrt(s + epsilon); v -= a``.

    optax.scale_by_rms with s beginning at 1 (``centered``: optax.scale_by_stddev), then
    optax.trace; slots "rms", centered "mg", and with a momentum "momentum".
    """

    _slot_names = {"rms": "rms/nu", "momentum": "trace/trace"}

    def __init__(
        self,
        learning_rate: rt.TensorLike,
        decay: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-10,
        use_locking: bool = False,
        centered: bool = False,
        name: str = "RMSProp",
    ) -> None:
        decay, momentum, epsilon = map(_rounded, (decay, momentum, epsilon))
        # TensorFlow's mean square begins at 1, and the rate is inside the momentum.
        scale = optax.scale_by_rms(decay, epsilon, 1.0)
        if centered:
            scale = scale_by_stddev(decay, epsilon)
            self._slot_names = self._slot_names | {"rms": "r_std_dev/nu", "mg": "r_std_dev/mu"}
        after = [optax.trace(momentum)] if momentum else []
        super().__init__(name, learning_rate, scale, after=after)


@public.add()
class AdadeltaOptimizer(_Optimizer):
    """Adadelta: optax.scale_by_adadelta."""

    _slot_names = {"accum": "ada_delta/e_g", "accum_update": "ada_delta/e_x"}

    def __init__(
        self,
        learning_rate: rt.TensorLike = 0.001,
        rho: float = 0.95,
        epsilon: float = 1e-8,
        use_locking: bool = False,
        name: str = "Adadelta",
    ) -> None:
        super().__init__(
            name, learning_rate, optax.scale_by_adadelta(_rounded(rho), _rounded(epsilon))
        )


@public.add()
class ExponentialMovingAverage:
    """Keeps shadow variables: ``shadow = decay * shadow + (1 - decay) * variable``, one atomic update per variable.

    Args:
        decay: such as 0.999.
        num_updates: a step count; with it the decay is at most ``(1 + n) / (10 + n)``.
        zero_debias: must be False.
        name: ending of the shadows' names.
    """

    def __init__(
        self,
        decay: float,
        num_updates: rt.TensorLike | None = None,
        zero_debias: bool = False,
        name: str = "ExponentialMovingAverage",
    ) -> None:
        if zero_debias:
            raise ValueError(
                "zero_debias is not in harness.tf1: shadows begin at the variables' initial values"
            )
        self._decay = decay
        self._num_updates = num_updates
        self.name = name
        self._averages: dict[Any, rt.Variable] = {}

    def apply(self, var_list: Sequence[rt.Variable] | None = None) -> rt.Operation:
        """Returns one operation that updates the shadows of ``var_list`` (all trainable variables), made at first.

        Args:
            var_list: variables, whose shadows begin at their initial values; and tensors of a known
                shape, whose shadows begin at 0.
        """
        done = []
        for variable in rt.trainable_variables() if var_list is None else var_list:
            shadow = self._averages.get(variable) or self._make_shadow(variable)
            inputs: list[Any] = (
                [variable] if self._num_updates is None else [variable, self._num_updates]
            )
            done.append(shadow.update(self._next_shadow, *inputs, name=f"{self.name}/update"))
        return rt.group(*done, name=self.name)

    def _next_shadow(
        self, shadow: Any, value: rt.TensorLike, num_updates: rt.TensorLike | None = None
    ) -> Any:
        # In the dtype of the shadow: a float64 decay would widen the whole update.
        decay = jnp.asarray(self._decay, shadow.dtype)
        if num_updates is not None:
            n = jnp.asarray(num_updates).astype(shadow.dtype)
            decay = jnp.minimum(decay, (1 + n) / (10 + n))
        return shadow - (1 - decay) * (shadow - value)

    def _make_shadow(self, variable: rt.Variable) -> rt.Variable:
        assert variable not in self._averages, "a variable has one shadow"
        with contextlib.ExitStack() as scopes:
            # The name of the shadow is that of the variable, wherever apply is called: checkpoints
            # hold it.
            scopes.enter_context(rt.name_scope(None))
            scopes.enter_context(rt.control_dependencies(None))
            # The shadow of a variable lies beside it; that of a tensor where any variable would.
            if isinstance(variable, rt.Variable):
                scopes.enter_context(rt.device(None))
                scopes.enter_context(rt.device(variable.device or None))
            shadow = rt.Variable(
                _first_average(variable), name=self.average_name(variable), trainable=False
            )
        if isinstance(variable, rt.Variable):
            variable.graph.add_to_collection("moving_average_variables", variable)
        self._averages[variable] = shadow
        return shadow

    def average(self, var: rt.Variable) -> rt.Variable | None:
        """Returns the shadow of ``var``, None before ``apply``."""
        return self._averages.get(var)

    def average_name(self, var: rt.Variable) -> str:
        """Returns the name of the shadow of ``var``."""
        return f"{var.op.name}/{self.name}"

    def variables_to_restore(
        self, moving_avg_variables: Sequence[Any] | None = None
    ) -> dict[str, Any]:
        """Maps names in a checkpoint to variables, so that a ``Saver`` gives the variables the shadows' values."""
        averaged = list(
            rt.trainable_variables() if moving_avg_variables is None else moving_avg_variables
        )
        # The checkpoint has the shadows under their names. Restored so, the variables take the
        # shadows' values.
        names = {self.average_name(v): v for v in averaged}
        shadows = set(self._averages.values())
        rest = {
            v.op.name: v for v in rt.global_variables() if v not in averaged and v not in shadows
        }
        return names | rest


def _first_average(averaged: rt.Variable | rt.Tensor) -> Any:
    """Returns the first value of the shadow of a variable or a tensor."""
    if isinstance(averaged, rt.Variable):
        return averaged.initial_value
    if averaged.shape is None or None in averaged.shape:
        raise ValueError(
            f"the moving average of {averaged.name!r} needs its shape, and that is {averaged.shape}"
        )
    return np.zeros([int(size or 0) for size in averaged.shape], averaged.dtype)


def _check_made(item: _T | None, name: str, what: str) -> _T:
    """Returns what ``apply_gradients`` has made; raises InvalidArgumentError where it was not called yet."""
    if item is None:
        raise rt.InvalidArgumentError(f"{name}: apply_gradients should be called before {what}")
    return item


@public.add("SyncReplicasOptimizer", "SyncReplicasOptimizerV2")
class SyncReplicasOptimizer(_Minimize, sync_replicas.SyncReplicas):  # type: ignore[misc]
    """``harness.SyncReplicas``: the mean of several workers' gradients, applied once; see ``docs/sync.md``.

    Args:
        opt: what applies the mean.
        replicas_to_aggregate: gradients in one step.
        total_num_replicas: workers; ``replicas_to_aggregate`` by default.
        variable_averages: must be None: run ``ExponentialMovingAverage.apply`` after the step.
        variables_to_average: must be None.
        use_locking: updates are atomic in any case.
        name: the same in all workers.
        replica_id: this worker's number (before 1.0); by default that of its device.
        options: further ones of ``harness.SyncReplicas``, such as ``sync_timeout_secs``.

    Raises:
        ValueError: ``variable_averages`` is given.
    """

    def __init__(
        self,
        opt: optimizer.Optimizer,
        replicas_to_aggregate: int,
        total_num_replicas: int | None = None,
        variable_averages: Any = None,
        variables_to_average: Any = None,
        use_locking: bool = False,
        name: str = "sync_replicas",
        replica_id: int | None = None,
        **options: Any,
    ) -> None:
        if variable_averages is not None or variables_to_average is not None:
            raise ValueError(
                "variable_averages is not there: run ExponentialMovingAverage.apply after the step"
            )
        total = total_num_replicas or None
        super().__init__(opt, replicas_to_aggregate, total, worker=replica_id, name=name, **options)
        self._nothing: rt.Operation | None = None
        self._ready: rt.Tensor | None = None

    def apply_gradients(  # type: ignore[override]
        self,
        grads_and_vars: Sequence[optimizer.GradientAndVariable],
        global_step: rt.Variable | None = None,
        name: str | None = None,
    ) -> rt.Tensor:
        """Does as in the harness; returns the global step after the aggregate, a tensor, as TensorFlow does."""
        # TensorFlow builds the parts that the chief asks for later while the gradients are applied.
        done = super().apply_gradients(grads_and_vars, global_step, name)
        with done.graph.as_default():
            with rt.name_scope(None), rt.control_dependencies(None):
                self._nothing = rt.no_op(name=f"{self.name}/init")
                self._ready = rt.report_uninitialized_variables(
                    rt.global_variables(), name=f"{self.name}/uninitialized"
                )
            with rt.control_dependencies([done]):
                return rt.identity(self.step, name or f"{self.name}/step")

    def get_init_tokens_op(self, num_tokens: int = -1) -> rt.Operation:
        """Returns an operation that does nothing: no tokens are needed.

        The argument is checked as ever.

        Raises:
            InvalidArgumentError: ``apply_gradients`` was not called yet, or the tokens would have
                been too few.
        """
        # TensorFlow releases workers by tokens. Nothing needs them here, but a program that would
        # hang there fails here too.
        fewest = self._needed - self._total
        if num_tokens >= 0 and num_tokens < fewest:
            raise rt.InvalidArgumentError(
                f"Too few tokens to finish the first step: {num_tokens} (given) < {fewest} (needed)"
            )
        return _check_made(self._nothing, self.name, "get_init_tokens_op")

    @property
    def chief_init_op(self) -> rt.Operation:
        """Nothing to run: the ps take the step from the global step."""
        return _check_made(self._nothing, self.name, "chief_init_op")

    local_step_init_op = chief_init_op

    @property
    def ready_for_local_init_op(self) -> rt.Tensor:
        """Names of the global variables that have no value."""
        return _check_made(self._ready, self.name, "ready_for_local_init_op")

    def make_session_run_hook(self, is_chief: bool, num_tokens: int = -1) -> SessionRunHook:
        """Makes a hook for monitored sessions that starts the chief's runner, unless the session does.

        It may be made before ``apply_gradients``; what is wrong is told when the session begins, as
        ``get_init_tokens_op`` tells it.
        """
        return _Hook(self, is_chief, num_tokens)


class _Hook(SessionRunHook):
    def __init__(self, sync: SyncReplicasOptimizer, is_chief: bool, num_tokens: int) -> None:
        self._sync = sync
        self._is_chief = is_chief
        self._num_tokens = num_tokens

    def begin(self) -> None:
        """Looks that there is something to run."""
        self._sync.get_init_tokens_op(self._num_tokens)

    def after_create_session(self, session: rt.Session, coord: Coordinator) -> None:
        """Starts the chief's runner, unless the runner is running."""
        if self._is_chief:
            self._sync.get_chief_queue_runner().create_threads(
                session, coord, daemon=True, start=True
            )
