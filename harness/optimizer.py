"""Optimizers: any optax transformation, its state beside the variables, its update one program on each ps."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax

import runtime as rt
from harness import narrow
from harness.checkpoints.partitions import slot_of

GradientAndVariable = tuple[rt.Tensor | None, rt.Variable]


class Optimizer:
    """Minimises a loss with an optax gradient transformation.

    Every variable has its own optax state, kept in slot variables on the variable's own task: ``mlp/w1/adam/mu`` beside
    ``mlp/w1``. One atomic program per task updates all variables of that task with their slots. Because each variable
    is updated by itself, a transformation that needs all gradients at once does not belong into ``transformation``:
    give it as ``before_push``.

    Args:
        transformation: e.g. ``optax.adam(1e-3)``. Schedules count the updates that the variable has had.
        before_push: a stateless optax transformation of all gradients together, applied on the worker before they are
            pushed: ``optax.clip_by_global_norm(1.0)``. It sees this worker's gradients, not an average of all workers.
        extra_args: tensors that the transformation's update gets as keyword arguments in each step, such as a learning
            rate that is computed or fed (optax: ``GradientTransformationExtraArgs``).
        name: first part of the names of operations.

    Raises:
        InvalidArgumentError: ``before_push`` keeps a state (it would be lost between steps).
    """

    def __init__(
        self,
        transformation: optax.GradientTransformation,
        *,
        before_push: optax.GradientTransformation | None = None,
        extra_args: Mapping[str, Any] | None = None,
        name: str = "optimizer",
    ) -> None:
        self.name = name
        self._extra_args = dict(extra_args or {})
        self._transformation = optax.with_extra_args_support(transformation)
        self._before_push = before_push
        self._slots: dict[rt.Variable, dict[str, rt.Variable]] = {}
        if before_push is not None and jax.tree.leaves(
            jax.eval_shape(before_push.init, jax.ShapeDtypeStruct((1,), "float32"))
        ):
            raise rt.InvalidArgumentError(
                "before_push keeps a state, which a worker loses when it restarts: use a stateless one"
            )

    def minimize(
        self,
        loss: rt.Tensor,
        global_step: rt.Variable | None = None,
        var_list: Sequence[rt.Variable] | None = None,
        name: str | None = None,
    ) -> rt.Operation:
        """One operation that computes the gradients of ``loss`` and applies them.

        Args:
            loss: floating point tensor.
            global_step: variable to add 1 to, on its own task, in the same message as that task's update.
            var_list: variables to train; the trainable variables of the graph by default.
            name: operation name.
        """
        return self.apply_gradients(self.compute_gradients(loss, var_list), global_step, name)

    def compute_gradients(
        self, loss: rt.Tensor, var_list: Sequence[rt.Variable] | None = None
    ) -> list[GradientAndVariable]:
        """Pairs of (gradient, variable); the gradient is None where ``loss`` does not depend on the variable.

        Args:
            loss: floating point tensor.
            var_list: variables; the trainable variables of the loss's graph by default.

        Raises:
            InvalidArgumentError: there are no variables to train.
        """
        with loss.graph.as_default():
            variables = list(rt.trainable_variables() if var_list is None else jax.tree.leaves(var_list))
        if not variables:
            raise rt.InvalidArgumentError(f"{self.name}: there are no variables to train; make some, or give var_list")
        return list(zip(narrow.gradients(loss, variables), variables, strict=True))

    def apply_gradients(
        self,
        grads_and_vars: Sequence[GradientAndVariable],
        global_step: rt.Variable | None = None,
        name: str | None = None,
    ) -> rt.Operation:
        """One operation that applies gradients, each on its variable's task.

        Args:
            grads_and_vars: what ``compute_gradients`` gave, possibly changed; pairs with a None gradient are left out.
            global_step: variable to add 1 to when the gradients are in.
            name: operation name.

        Raises:
            InvalidArgumentError: no gradient is given for any variable; names the variables.
        """
        pairs = [(g, v) for g, v in grads_and_vars if g is not None]
        if not pairs:
            names = ", ".join(v.spec.name for _, v in grads_and_vars) or "none"
            raise rt.InvalidArgumentError(f"{self.name}: no gradients for any variable (variables: {names})")
        graph = pairs[0][1].graph
        with graph.as_default(), rt.name_scope(name or self.name):
            pairs = [(narrow.narrowed(g, v), v) for g, v in self._prepared(pairs)]
            updates: dict[str, rt.Operation] = {}
            for device, group in _by_device(pairs).items():
                updates[device] = self._update(group)
            done = list(updates.values())
            if global_step is not None:
                # Beside this task's update, not after those of other tasks: that would cost a third round trip.
                beside = updates.get(global_step.device)
                before = [beside] if beside is not None else [g.op for g, _ in pairs]
                with rt.control_dependencies(before):
                    done.append(global_step.assign_add(1, name="count_step").op)
            return rt.group(*done, name="train")

    def get_slot_names(self) -> list[str]:
        """Names of the slots that variables of this optimizer have, such as ``adam/mu``."""
        return sorted({name for slots in self._slots.values() for name in slots})

    def get_slot(self, variable: rt.Variable, name: str) -> rt.Variable | None:
        """The slot variable ``name`` of ``variable``, or None when there is none (yet)."""
        return self._slots.get(variable, {}).get(name)

    def variables(self) -> list[rt.Variable]:
        """All slot variables."""
        return [slot for slots in self._slots.values() for slot in slots.values()]

    def _prepared(self, pairs: Sequence[tuple[rt.Tensor, rt.Variable]]) -> list[tuple[rt.Tensor, rt.Variable]]:
        transform = self._before_push
        if transform is None:
            return list(pairs)

        def together(gradients: Any) -> Any:
            return transform.update(gradients, transform.init(gradients))[0]

        changed = rt.call(together, [g for g, _ in pairs], name="before_push")
        return list(zip(changed, (v for _, v in pairs), strict=True))

    def _update(self, pairs: Sequence[tuple[rt.Tensor, rt.Variable]]) -> rt.Operation:
        """The update of all variables of one task, with their slots, as one program."""
        variables = [v for _, v in pairs]
        slots = [list(self._slots_of(v).values()) for v in variables]
        structures = [self._structure(v) for v in variables]
        counts = [len(s) for s in slots]
        extra = [rt.as_tensor(value) for value in self._extra_args.values()]

        def step(*arrays: Any) -> tuple[list[Any], tuple[()]]:
            old = list(arrays[: len(variables)])
            states = list(arrays[len(variables) : len(variables) + sum(counts)])
            gradients = arrays[len(variables) + sum(counts) : -len(extra) or None]
            given = dict(zip(self._extra_args, arrays[-len(extra) :], strict=True)) if extra else {}
            new_values, new_states = [], []
            for value, gradient, structure, count in zip(old, gradients, structures, counts, strict=True):
                state = jax.tree.unflatten(structure, states[:count])
                del states[:count]
                gradient = gradient.astype(value.dtype)  # it may have crossed the wire in fewer bits
                change, state = self._transformation.update(gradient, state, value, **given)
                new_values.append(optax.apply_updates(value, change))
                new_states += jax.tree.leaves(state)
            return [*new_values, *new_states], ()

        everything = [*variables, *(s for group in slots for s in group)]
        applied: rt.Operation = rt.update(everything, step, [*(g for g, _ in pairs), *extra], name="apply")
        return applied

    def _structure(self, variable: rt.Variable) -> Any:
        return jax.tree.structure(self._state(variable))

    def _state(self, variable: rt.Variable) -> Any:
        return jax.eval_shape(self._transformation.init, jax.ShapeDtypeStruct(variable.shape, variable.dtype))

    def _slots_of(self, variable: rt.Variable) -> dict[str, rt.Variable]:
        """The slot variables of ``variable``, made at the first call, in the order of the state's leaves."""
        if variable in self._slots:
            return self._slots[variable]
        slots: dict[str, rt.Variable] = {}
        with rt.name_scope(None), rt.control_dependencies(None):
            for index, (path, _) in enumerate(jax.tree.flatten_with_path(self._state(variable))[0]):
                name = _slot_name(self._state(variable), path)
                while name in slots:
                    name += "_"
                with rt.device(variable.device or None):
                    slots[name] = rt.Variable(
                        self._initial(variable, index), name=f"{variable.spec.name}/{name}", trainable=False
                    )
                slot_of(variable, slots[name], name)
        self._slots[variable] = slots
        return slots

    def _initial(self, variable: rt.Variable, index: int) -> Callable[[], rt.Tensor]:
        init = self._transformation.init

        def make() -> rt.Tensor:
            if rt.get_default_graph() is not variable.graph:  # the graph only wants to know the shape
                leaf = jax.tree.leaves(self._state(variable))[index]
                return rt.placeholder(leaf.dtype, leaf.shape)
            tensor: rt.Tensor = rt.call(
                lambda v: jax.tree.leaves(init(v))[index], variable.initial_value, name="initial"
            )
            return tensor

        return make


def _by_device(pairs: Sequence[tuple[rt.Tensor, rt.Variable]]) -> dict[str, list[tuple[rt.Tensor, rt.Variable]]]:
    groups: dict[str, list[tuple[rt.Tensor, rt.Variable]]] = {}
    for gradient, variable in pairs:
        groups.setdefault(variable.device, []).append((gradient, variable))
    return groups


def _slot_name(state: Any, path: Sequence[Any]) -> str:
    """``adam/mu`` for the leaf at ``path`` of an optax state: the kind of state, then the field."""
    kind, fields = "", []
    for key in path:
        if hasattr(state, "_fields"):
            kind = _kind(type(state).__name__)
        if isinstance(key, jax.tree_util.GetAttrKey):
            state = getattr(state, key.name)
            fields.append(key.name)
        elif isinstance(key, jax.tree_util.SequenceKey):
            state = state[key.idx]
        elif isinstance(key, jax.tree_util.DictKey):
            state = state[key.key]
            fields.append(str(key.key))
    return "/".join(part for part in (kind, *fields[-1:]) if part) or "state"


def _kind(name: str) -> str:
    """``ScaleByAdamState`` -> ``adam``, ``TraceState`` -> ``trace``."""
    bare = re.sub(r"^(ScaleBy|Scale)(?=[A-Z])|State$", "", name)
    return re.sub(r"(?<!^)(?=[A-Z])", "_", bare).lower() or "state"
