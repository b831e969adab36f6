"""Optimizers: any optax transformation, its state beside the variables, its update one program on each ps."""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax

import runtime as rt
from harness.checkpoints.names import slot_of
from harness.optimizers import wire_precision
from harness.optimizers.separable import CLIP, dependences, split_clip, what_mixes
from harness.optimizers.slot_names import is_key, slot_name
from harness.optimizers.tables import TableOptimizer
from harness.optimizers.variable_tree import VariableTree

GradientAndVariable = tuple[rt.Tensor | rt.RowGradient | None, rt.Variable]
"""A gradient, if there is one, and its variable; for a table its rows and the table."""
mean_is_clipped: ContextVar[bool] = ContextVar("the ps clip the mean of gradients", default=False)
"""True while an optimizer makes an operation for gradients whose mean the ps clip."""


class Optimizer:
    """Minimises a loss with an optax gradient transformation.

    Every variable has its own optax state, kept in slot variables on the variable's own task:
    ``mlp/w1/adam/mu`` beside ``mlp/w1``. One atomic program per task updates all variables of that
    task with their slots.

    Each variable is updated alone. So a transformation that needs all gradients at once
    (``optax.apply_if_finite``) is refused as ``transformation``. A stateless one may be
    ``before_push``. The exception is a clip at the front of a chain, which clips all gradients of
    an update together (those of this worker, or their mean with ``SyncReplicas``):

        clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
        train_op = harness.Optimizer(clipped).minimize(loss, global_step)

    Args:
        transformation: e.g. ``optax.adam(1e-3)``. Schedules count the updates that the variable has
            had. Random keys in its state (``optax.add_noise``) differ from variable to variable.
        params: the pytree of variables that masks and labels of the transformation are written for
            (``optax.masked``, ``adamw(mask=...)``, ``optax.multi_transform``); of a list of
            variables, the dictionary of their names. ``by_name`` makes masks and labels of names.
            Only masks and labels need ``params``.
        before_push: a stateless optax transformation of all gradients of this worker together,
            before the push. The gradients are not averaged over workers yet.
        extra_args: keyword arguments of the transformation's update in each step, as tensors, such
            as a learning rate that is computed or fed (optax: ``GradientTransformationExtraArgs``).
        tables: the optax transformation of the rows of tables, e.g. ``rowwise_adagrad(0.01)``. Each
            row that a step has looked up is updated as a variable of its own ("lazily"); a count in
            the state counts the updates of the table.
        name: first part of the names of operations.

    Raises:
        InvalidArgumentError: ``before_push`` keeps a state, which would be lost between steps. The
            update of one variable by ``transformation`` depends on other variables; the error names
            the part of the transformation. A mask or label does not fit ``params``.
    """

    def __init__(
        self,
        transformation: optax.GradientTransformation,
        *,
        params: object = None,
        before_push: optax.GradientTransformation | None = None,
        extra_args: Mapping[str, rt.TensorLike] | None = None,
        tables: optax.GradientTransformation | None = None,
        name: str = "optimizer",
    ) -> None:
        if not hasattr(transformation, "init"):
            raise rt.InvalidArgumentError(
                f"{name}: the transformation is one of optax, such as optax.adam(1e-3), and not "
                f"{getattr(transformation, '__name__', repr(transformation))}"
            )
        self.name = name
        self.clip_norm, transformation = split_clip(transformation)
        """The largest norm of all gradients of an update together; None for no limit."""
        self._extra_args = dict(extra_args or {})
        self._transformation = optax.with_extra_args_support(transformation)
        self.before_push = before_push
        self._tree = None if params is None else VariableTree(params)
        self._slots: dict[rt.Variable, dict[str, rt.Variable]] = {}
        if before_push is not None and jax.tree.leaves(
            jax.eval_shape(before_push.init, jax.ShapeDtypeStruct((1,), "float32"))
        ):
            raise rt.InvalidArgumentError(
                "before_push keeps a state, which a worker loses when it restarts: use a stateless "
                "one"
            )
        self._abstract_args = {
            name: _abstract_value(value) for name, value in self._extra_args.items()
        }
        self._tables = TableOptimizer(tables, self._abstract_args, name)
        # A ps has only the variables of its own task, so an update over all of them would be wrong
        # without a word.
        mixing = what_mixes(transformation, self._abstract_args)
        if mixing is not None:
            part, keeps_state = mixing
            raise rt.InvalidArgumentError(
                f"{name}: with {part} the update of a variable depends on other variables, but "
                "here each is updated by itself, on its own task: "
                + (
                    f"leave {part} out; what all gradients together need must be a stateless "
                    "before_push"
                    if keeps_state
                    else f"give {part} as before_push, which sees all gradients of a worker"
                    + ("; or put it first in the chain" if part == CLIP else "")
                )
            )
        if self._tree is not None:
            # A mask that does not fit is an error here, at the line of the program that gave the
            # mask.
            for variable in self._tree.variables:
                self._abstract_state(variable)

    def minimize(
        self: AnyOptimizer,
        loss: rt.Tensor,
        global_step: rt.Variable | None = None,
        var_list: Sequence[rt.Variable] | None = None,
        name: str | None = None,
    ) -> rt.Operation:
        """Makes an operation that computes the gradients of ``loss`` and applies them.

        Args:
            loss: floating point tensor.
            global_step: variable to add 1 to, on its own task, in the same message as that task's
                update.
            var_list: variables to train; the trainable variables of the graph by default.
            name: operation name.
        """
        return self.apply_gradients(self.compute_gradients(loss, var_list), global_step, name)

    def compute_gradients(
        self, loss: rt.Tensor, var_list: Sequence[rt.Variable] | None = None
    ) -> list[GradientAndVariable]:
        """Returns pairs of (gradient, variable).

        The gradient is None where ``loss`` does not depend on the variable.

        Args:
            loss: floating point tensor.
            var_list: variables; the trainable variables of the loss's graph by default.

        Raises:
            InvalidArgumentError: there are no variables to train, or ``loss`` is not one number.
        """
        if loss.shape:
            raise rt.InvalidArgumentError(
                f"{self.name}: the loss {loss.name!r} is not one number but has shape "
                f"{list(loss.shape)}: give its mean, rt.numpy.mean(loss), or its sum"
            )
        with loss.graph.as_default():
            variables = list(
                [*rt.trainable_variables(), *self._tables.find(loss.graph)]
                if var_list is None
                else jax.tree.leaves(var_list)
            )
        if not variables:
            raise rt.InvalidArgumentError(
                f"{self.name}: there are no variables to train; make some, or give var_list"
            )
        return list(zip(wire_precision.gradients_of(loss, variables), variables, strict=True))

    def apply_gradients(
        self,
        grads_and_vars: Sequence[GradientAndVariable],
        global_step: rt.Variable | None = None,
        name: str | None = None,
    ) -> rt.Operation:
        """Makes an operation that applies gradients, each on its variable's task.

        Args:
            grads_and_vars: pairs of ``compute_gradients``, possibly changed. Pairs with a None
                gradient are left out. A variable in several pairs gets one update after the other,
                in their order, as one atomic program.
            global_step: variable to add 1 to when the gradients are in.
            name: operation name.

        Raises:
            InvalidArgumentError: No variable has a gradient; the error names the variables.
        """
        pairs, rows = _split_pairs(grads_and_vars, self.name)
        graph = rows[0].table.graph if rows else pairs[0][1].graph
        with graph.as_default(), rt.name_scope(name or self.name):
            pairs = [
                (wire_precision.narrow_gradient(g, v), v) for g, v in self._prepare_gradients(pairs)
            ]
            clips = self.clip_norm is not None and not mean_is_clipped.get()
            whole = clips or self.before_push is not None
            pushes = self._tables.update_all(rows, _as_tensors(self._extra_args), whole)
            # All of a step leaves together: a worker that dies has sent a ps all or nothing.
            with rt.control_dependencies([t.op for push in pushes for t in push.inputs]):
                # One update for each task, in the order of the variables.
                devices = dict.fromkeys(v.device for _, v in pairs)
                updates = {
                    device: self._update_task([(g, v) for g, v in pairs if v.device == device])
                    for device in devices
                }
                done = [*updates.values(), *pushes]
                if global_step is not None:
                    beside = updates.get(global_step.device)
                    done.append(_count_step(global_step, beside, [g for g, _ in pairs]))
            return rt.group(*done, name="train")

    def get_slot_names(self) -> list[str]:
        """Returns the names of the slots of this optimizer's variables, such as ``adam/mu``."""
        return sorted({name for slots in self._slots.values() for name in slots})

    def get_slot(self, variable: rt.Variable, name: str) -> rt.Variable | None:
        """Returns the slot variable ``name`` of ``variable``, or None if there is none yet."""
        return self._slots.get(variable, {}).get(name)

    def variables(self) -> list[rt.Variable]:
        """Returns all slot variables."""
        return [slot for slots in self._slots.values() for slot in slots.values()]

    def _prepare_gradients(
        self, pairs: Sequence[tuple[rt.Tensor, rt.Variable]]
    ) -> list[tuple[rt.Tensor, rt.Variable]]:
        parts = [] if self.before_push is None else [self.before_push]
        if self.clip_norm is not None:
            # Without a clip too, constants become gradients of this worker, which the ps can clip.
            parts.append(
                optax.identity()
                if mean_is_clipped.get()
                else optax.clip_by_global_norm(self.clip_norm)
            )
        if not parts:
            return list(pairs)
        transform = optax.chain(*parts)

        def together(gradients: list[jax.Array]) -> list[jax.Array]:
            changed: list[jax.Array] = transform.update(gradients, transform.init(gradients))[0]
            return changed

        changed = rt.call(together, [g for g, _ in pairs], name="before_push")
        return list(zip(changed, (v for _, v in pairs), strict=True))

    def _update_task(self, pairs: Sequence[tuple[rt.Tensor, rt.Variable]]) -> rt.Operation:
        """Updates all variables of one task, with their slots, in one program."""
        places = {v: i for i, v in enumerate(dict.fromkeys(v for _, v in pairs))}
        assert len({v.device for v in places}) == 1, "one program runs on one task"
        slots = [list(self._slots_of(v).values()) for v in places]
        extra = _as_tensors(self._extra_args)
        sizes = [len(places), *map(len, slots), len(pairs), len(extra)]

        # One program, so that no reader of the ps sees a variable of this step beside a slot of the
        # step before.
        def step(*arrays: jax.Array) -> tuple[list[jax.Array], tuple[()]]:
            values, *stored, gradients, given = _cut_lists(arrays, sizes)
            states = [
                _from_arrays(leaves, self._transformation.init(self._place_alone(variable, value)))
                for variable, value, leaves in zip(places, values, stored, strict=True)
            ]
            for (_, variable), gradient in zip(pairs, gradients, strict=True):
                place = places[variable]
                values[place], states[place] = self._apply_gradient(
                    variable, gradient, values[place], states[place], given
                )
            return [*values, *(leaf for state in states for leaf in _to_arrays(state))], ()

        everything = [*places, *(s for group in slots for s in group)]
        applied: rt.Operation = rt.update(
            everything, step, [*(g for g, _ in pairs), *extra], name="apply"
        )
        return applied

    def _apply_gradient(
        self,
        variable: rt.Variable,
        gradient: jax.Array,
        value: jax.Array,
        state: optax.OptState,
        given: Sequence[jax.Array],
    ) -> tuple[jax.Array, optax.OptState]:
        """Returns the value and the state of one variable after one gradient."""
        arguments = dict(zip(self._extra_args, given, strict=True))
        one = functools.partial(self._place_alone, variable)
        # The gradient may have crossed the wire in fewer bits.
        change, state = self._transformation.update(
            one(gradient.astype(value.dtype)), state, one(value), **arguments
        )
        return optax.apply_updates(value, jax.tree.leaves(change)[0]), state

    def _place_alone(self, variable: rt.Variable, value: object) -> Any:
        """Places the value of one variable in the tree that masks are written for."""
        return value if self._tree is None else self._tree.only(variable, value)

    def _abstract_state(self, variable: rt.Variable) -> optax.OptState:
        given = self._place_alone(variable, jax.ShapeDtypeStruct(variable.shape, variable.dtype))
        try:
            with jax.enable_x64(np.float64 in (variable.dtype, jax.numpy.zeros(()).dtype)):
                return jax.eval_shape(self._transformation.init, given)
        except Exception as error:
            # The error is of optax, or of a function of the user's.
            cure = (
                "each variable is updated by itself: give Optimizer(params=...), the tree of "
                "variables that masks and labels are written for"
                if self._tree is None
                else "masks and labels must fit params"
            )
            text = rt.lowlevel.one_line(error)
            raise rt.InvalidArgumentError(
                f"{self.name}: the transformation does not take variable {variable.spec.name!r}: "
                f"{cure} ({text})"
            ) from error

    def _slots_of(self, variable: rt.Variable) -> dict[str, rt.Variable]:
        """Returns the slot variables of ``variable`` in the order of the state's leaves.

        The first call makes them.
        """
        if variable in self._slots:
            return self._slots[variable]
        slots: dict[str, rt.Variable] = {}
        first = functools.cache(functools.partial(self._initial_slots, variable))
        with rt.name_scope(None), rt.control_dependencies(None):
            state = self._abstract_state(variable)
            own = () if self._tree is None else self._tree.path(variable)
            leaves = [
                jax.eval_shape(jax.random.key_data, leaf) if is_key(leaf) else leaf
                for leaf in jax.tree.leaves(state)
            ]
            shared = self._shared_leaves(variable, state)
            for index, (path, _) in enumerate(jax.tree.flatten_with_path(state)[0]):
                # A transformation with masks has a state for the whole tree; the place of the leaf
                # in the tree goes.
                if own and path[-len(own) :] == own:
                    path = path[: -len(own)]
                name = slot_name(state, path)
                while name in slots:
                    name += "_"
                # A slot lies beside its variable, whatever scopes of devices the caller has opened.
                with rt.device(None), rt.device(variable.device or None):
                    slots[name] = rt.Variable(
                        functools.partial(_pick_slot, first, index, leaves[index], variable.graph),
                        name=self._name_slot(variable, name),
                        trainable=False,
                    )
                slot_of(variable, slots[name], shared=shared[index])
        assert len(slots) == len(leaves), "every leaf of the state has a slot"
        self._slots[variable] = slots
        return slots

    def _name_slot(self, variable: rt.Variable, name: str) -> str:
        """Returns the name of the slot variable ``name`` of ``variable``."""
        return f"{variable.spec.name}/{name}"

    def _shared_leaves(self, variable: rt.Variable, state: optax.OptState) -> list[bool]:
        """Returns for each leaf of the state True if the leaf is always the same for all parts of a variable.

        Counts are the same. Leaves that depend on gradients or values differ, and so do random
        keys.
        """
        leaves = jax.tree.leaves(state)
        if variable.save_slice_info is None:
            return [False] * len(leaves)
        given = self._place_alone(variable, jax.ShapeDtypeStruct(variable.shape, variable.dtype))
        found = dependences(self._transformation, given, self._abstract_args)
        behind = [{0}] * len(leaves) if found is None else found[1]
        return [not of and not is_key(leaf) for of, leaf in zip(behind, leaves, strict=True)]

    def _initial_slots(self, variable: rt.Variable) -> list[rt.Tensor]:
        """Returns the first values of all slots, which are made by one operation."""
        init, name = self._transformation.init, variable.spec.name

        def begin(value: jax.Array) -> list[jax.Array]:
            return _to_arrays(init(self._place_alone(variable, value)), own_keys_of=name)

        first: list[rt.Tensor] = rt.call(begin, variable.initial_value, name="initial")
        return first


def _pick_slot(
    first: Callable[[], Sequence[rt.Tensor]],
    index: int,
    leaf: jax.ShapeDtypeStruct,
    graph: rt.Graph,
) -> rt.Tensor:
    # In a scratch graph, the caller only wants to know the shape.
    if rt.get_default_graph() is not graph:
        return rt.placeholder(leaf.dtype, leaf.shape)
    return first()[index]


def _split_pairs(
    grads_and_vars: Iterable[GradientAndVariable], name: str
) -> tuple[list[tuple[rt.Tensor, rt.Variable]], list[rt.RowGradient]]:
    """Returns the gradients of variables, and those of tables."""
    given = list(grads_and_vars)
    rows = [g for g, _ in given if isinstance(g, rt.RowGradient)]
    pairs = [(g, v) for g, v in given if isinstance(g, rt.Tensor)]
    if not pairs and not rows:
        names = ", ".join(v.name for _, v in given) or "none"
        raise rt.InvalidArgumentError(f"{name}: no gradients for any variable (variables: {names})")
    return pairs, rows


def _as_tensors(values: Mapping[str, rt.TensorLike]) -> list[rt.Tensor]:
    return [rt.as_tensor(value) for value in values.values()]


def _count_step(
    global_step: rt.Variable, beside: rt.Operation | None, gradients: Sequence[rt.Tensor]
) -> rt.Operation:
    """Counts a step beside the update of the step's task, if there is one, or after the gradients.

    A count after the updates of other tasks would cost a third round trip.
    """
    with rt.control_dependencies([beside] if beside is not None else [g.op for g in gradients]):
        counted: rt.Operation = global_step.assign_add(1, name="count_step").op
        return counted


def _to_arrays(state: optax.OptState, own_keys_of: str | None = None) -> list[jax.Array]:
    """Converts the leaves of an optax state to the arrays of slot variables.

    Random keys become their bits; other leaves stay.

    Args:
        state: the state.
        own_keys_of: name of a variable. The name is folded into the keys, so that each variable has
            keys of its own.
    """
    leaves = jax.tree.leaves(state)
    if own_keys_of is not None:
        number = zlib.crc32(own_keys_of.encode())
        leaves = [jax.random.fold_in(leaf, number) if is_key(leaf) else leaf for leaf in leaves]
    return [jax.random.key_data(leaf) if is_key(leaf) else leaf for leaf in leaves]


def _cut_lists(arrays: Sequence[jax.Array], sizes: Sequence[int]) -> list[list[jax.Array]]:
    """Cuts arrays into lists of so many."""
    assert len(arrays) == sum(sizes), "every array belongs to one list"
    left = iter(arrays)
    return [list(itertools.islice(left, size)) for size in sizes]


def _from_arrays(leaves: Sequence[jax.Array], first: optax.OptState) -> optax.OptState:
    """Rebuilds the state of which ``_to_arrays`` made ``leaves``.

    ``first`` is a state of the same structure and kinds.
    """
    kinds, structure = jax.tree.flatten(first)
    whole = [
        jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(kind)) if is_key(kind) else leaf
        for leaf, kind in zip(leaves, kinds, strict=True)
    ]
    return jax.tree.unflatten(structure, whole)


def _abstract_value(value: object) -> jax.ShapeDtypeStruct:
    """Describes an extra argument as the argument is when a step runs, as far as its shape is known."""
    if not isinstance(value, rt.Tensor | rt.Variable):
        value = np.asarray(value)
    shape = () if value.shape is None else tuple(1 if d is None else d for d in value.shape)
    return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(value.dtype))


def updates_of(train: rt.Operation) -> list[rt.Operation]:
    """Returns the updates of ``train``, an operation that ``Optimizer.apply_gradients`` has just made.

    Operations of the caller's open ``control_dependencies`` run before the updates, and are left
    out.
    """
    before = train.graph.under_control
    return [op for op in train.control_inputs if op not in before]


class WrappedOptimizer:
    """An optimizer that changes only the way in which the updates of another optimizer come together.

    Args:
        optimizer: the optimizer that applies gradients to variables.
        name: first part of the names of operations.
    """

    drops_gradients = False
    """True if the optimizer may drop a gradient: an optimizer that counts gradients goes inside such an optimizer."""

    def __init__(self, optimizer: AnyOptimizer, name: str) -> None:
        self.name = name
        self.optimizer = optimizer

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            usual = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(rt.lowlevel.explain_name(f"{type(self).__name__}.{name}") or usual)

    def shared_name(self, grads_and_vars: Sequence[GradientAndVariable]) -> str:
        """Returns the name of the resource that all workers share on the ps for one train operation.

        The name holds the variables that the operation updates, and is used once in a graph. So two
        optimizers of one name share nothing, in whatever order their steps come. All workers must
        make the same graph.
        """
        updated = [v for g, v in grads_and_vars if g is not None]
        # A checksum keeps the name short, and is the same in every process.
        names = [v.name if isinstance(v, rt.Table) else v.spec.name for v in updated]
        digest = zlib.crc32("\n".join(names).encode())
        return updated[0].graph.unique_name(f"{self.name}/{digest:08x}")

    # A loss is minimised by the two methods below, which may be those of another optimizer.
    minimize = Optimizer.minimize

    def compute_gradients(
        self, loss: rt.Tensor, var_list: Sequence[rt.Variable] | None = None
    ) -> list[GradientAndVariable]:
        """Returns pairs of (gradient, variable) of this worker, from the wrapped optimizer."""
        return self.optimizer.compute_gradients(loss, var_list)

    def apply_gradients(
        self,
        grads_and_vars: Sequence[GradientAndVariable],
        global_step: rt.Variable | None = None,
        name: str | None = None,
    ) -> rt.Operation:
        """Makes the wrapped optimizer's operation that applies gradients, each on its variable's task."""
        return self.optimizer.apply_gradients(grads_and_vars, global_step, name)

    def get_slot(self, variable: rt.Variable, name: str) -> rt.Variable | None:
        """Returns the wrapped optimizer's slot."""
        return self.optimizer.get_slot(variable, name)

    def get_slot_names(self) -> list[str]:
        """Returns the wrapped optimizer's slot names."""
        return self.optimizer.get_slot_names()

    def variables(self) -> list[rt.Variable]:
        """Returns the wrapped optimizer's variables."""
        return self.optimizer.variables()


AnyOptimizer = Optimizer | WrappedOptimizer
"""An optimizer of variables, or a wrapper around an optimizer."""
