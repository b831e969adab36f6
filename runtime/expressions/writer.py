"""Writer: the jaxpr of a stage becomes an expression list, equal in every process that plans the same graph.

Calls (``jit``, custom derivatives, rematerialisation) are written out in their place. Equations
without a needed result are left out. An array whose elements are all equal becomes a number that is
broadcast.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import NamedSharding

from runtime.errors import one_line
from runtime.expressions.kinds import Parameter, is_narrow
from runtime.expressions.table import GENERATORS, IDENTITIES, INLINED, RENAMED, TABLE
from runtime.proto import expressions_pb2 as pb
from runtime.proto import stage_pb2
from runtime.tensor_spec import Array, DType, canonical_dtype, dtype_name

Operand = int
"""The number of a value in an equation: from 0 on a value of the computation, below 0 a constant."""


class NotInTableError(Exception):
    """A computation that no expression list can hold; the text says why."""


def write_expressions(jaxpr: ClosedJaxpr, platform: str = "cpu") -> bytes:
    """Writes a computation down.

    Args:
        jaxpr: Computation of arrays from arrays.
        platform: XLA's name of the platform of the task. Of ``platform_dependent``, only the branch
            of this platform is written.

    Raises:
        NotInTableError: An operation of the jaxpr is not in the table; the error names the
            operation.
    """
    if jaxpr.effects:
        raise NotInTableError(f"it has effects ({', '.join(sorted(map(str, jaxpr.effects)))})")
    # A callback or a print would run again if a step that was cut off runs again.
    writer = _ListWriter(platform)
    main = writer.computation(jaxpr)
    partitionable: bool = jax.config.jax_threefry_partitionable  # type: ignore[attr-defined]
    # The setting decides the bits of random numbers, so it travels with the list.
    arguments = [_write_spec(aval.shape, aval.dtype) for aval in jaxpr.in_avals]
    made = pb.ExpressionsDef(
        arguments=arguments,
        constants=writer.constants,
        main=main,
        threefry_partitionable=partitionable,
    )
    return made.SerializeToString(deterministic=True)


class _ListWriter:
    """The writer of one expression list, whose computations share the constants of the list."""

    def __init__(self, platform: str) -> None:
        self.platform = platform
        self.constants: list[pb.ConstantDef] = []
        self._known: dict[tuple[str, tuple[int, ...], bytes], Operand] = {}

    def computation(self, closed: ClosedJaxpr) -> pb.ComputationDef:
        body = _ComputationWriter(self, len(closed.jaxpr.invars))
        results = body.inline(
            closed, list(range(len(closed.jaxpr.invars))), [True] * len(closed.jaxpr.outvars)
        )
        return pb.ComputationDef(
            arguments=len(closed.jaxpr.invars), equations=body.equations, results=results
        )

    def constant(self, array: Array) -> Operand:
        data = (
            np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
        )
        # Equal constants of several operations are sent once.
        key = (array.dtype.name, array.shape, data)
        if key not in self._known:
            self.constants.append(
                pb.ConstantDef(spec=_write_spec(array.shape, array.dtype), data=data)
            )
            self._known[key] = -len(self.constants)
        return self._known[key]


class _ComputationWriter:
    """The writer of the equations of one computation."""

    def __init__(self, writer: _ListWriter, arguments: int) -> None:
        self._writer = writer
        self._values = arguments
        self.equations: list[pb.EquationDef] = []

    def inline(
        self, closed: ClosedJaxpr, arguments: Sequence[Operand], needed: Sequence[bool]
    ) -> list[Operand]:
        """Writes the equations of a jaxpr behind those that are there.

        Args:
            closed: the jaxpr.
            arguments: the values to use as arguments of the jaxpr.
            needed: for each result, True if a later equation needs the result.

        Returns:
            The results. A result that is not needed may be any value.
        """
        jaxpr = closed.jaxpr
        where: dict[Var, Operand] = dict(zip(jaxpr.invars, arguments, strict=True))
        live = _find_live(jaxpr, needed)
        # A constant is written at its first use only, since most equations may be left out.
        consts = dict(zip(jaxpr.constvars, closed.consts, strict=True))

        def operand(atom: Var | Literal) -> Operand:
            if isinstance(atom, Literal):
                return self._write_constant(np.asarray(atom.val, getattr(atom.aval, "dtype", None)))
            if atom not in where and atom in consts:
                where[atom] = self._write_constant(consts[atom])
            # A value that was not made belongs to a result that is not needed, and any value will
            # do.
            return where.get(atom, 0)

        for equation, wanted in zip(jaxpr.eqns, live, strict=True):
            if any(wanted):
                results = self._write_equation(
                    equation, [operand(atom) for atom in equation.invars], wanted
                )
                where.update(zip(equation.outvars, results, strict=True))
        return [operand(atom) for atom in jaxpr.outvars]

    def _write_equation(
        self, equation: JaxprEqn, operands: Sequence[Operand], needed: Sequence[bool]
    ) -> list[Operand]:
        name = equation.primitive.name
        params = RENAMED[name](equation.params) if name in RENAMED else equation.params
        if name in IDENTITIES:
            return list(operands)
        # The equation that is solved matters to derivatives alone: only the solver is written.
        if name == "custom_linear_solve":
            lengths = params["const_lengths"]
            before = lengths.matvec + lengths.vecmat
            given = [*operands[before : before + lengths.solve], *operands[sum(lengths) :]]
            return self.inline(params["jaxprs"].solve, given, needed)
        # Only a branch by platform refers to the index. The branch is chosen below, and needs none.
        if name == "platform_index":
            return [0]
        if name == "cond" and params.get("branches_platforms") is not None:
            branch = params["branches"][self._branch_by(params["branches_platforms"])]
            return self.inline(_close_jaxpr(branch), operands[1:], needed)
        if name in INLINED:
            if name == "remat2" and params["differentiated"]:
                operands = self._kept_apart(operands, params["prevent_cse"])
            return self.inline(_close_jaxpr(params[INLINED[name]]), operands, needed)
        return self._add_equation(name, operands, params, len(equation.outvars))

    def _add_equation(
        self, name: str, operands: Sequence[Operand], params: Mapping[str, Parameter], results: int
    ) -> list[Operand]:
        row = TABLE.get(name)
        if row is None:
            raise NotInTableError(f"JAX's operation {name!r} is not in the table of operations")
        assert max(operands, default=-1) < self._values, "an operand comes later than its equation"
        made = pb.EquationDef(operation=name, operands=operands, results=results)
        for attribute, kind in row.attributes.items():
            value = params.get(attribute)
            if value is None and kind.optional:
                continue
            try:
                written = kind.write(value)
            except (AttributeError, TypeError, ValueError) as error:
                raise NotInTableError(f"{attribute} of {name!r}: {one_line(error)}") from error
            # The order of the table makes the bytes equal in every process.
            into = made.attributes.add(name=attribute)
            if kind.field == "computations":
                for one in written:
                    computation = self._writer.computation(_close_jaxpr(one))
                    if problem := kind.problem(computation):
                        raise NotInTableError(f"{attribute} of {name!r}: {problem}")
                    into.computations.values.append(computation)
            elif kind.field == "integers":
                into.integers.values.extend(written)
            else:
                setattr(into, kind.field, written)
        # A parameter that the table does not know may change the meaning of the operation. On one
        # device JAX notes an empty mesh, which says nothing.
        for parameter, value in params.items():
            if isinstance(value, NamedSharding) and value.mesh.empty:
                continue
            if (
                value is not None
                and parameter not in row.attributes
                and parameter not in row.implied
            ):
                raise NotInTableError(
                    f"{parameter}={value!r} of {name!r} is not in the table of operations"
                )
        self.equations.append(made)
        self._values += results
        return list(range(self._values - results, self._values))

    def _branch_by(self, platforms: Sequence[Sequence[str] | None]) -> int:
        for index, names in enumerate(platforms):
            if names is None or self._writer.platform in names:
                return index
        raise NotInTableError(f"nothing is said of {self._writer.platform}, only of {platforms}")

    def _kept_apart(
        self, operands: Sequence[Operand], apart: bool | Sequence[bool]
    ) -> list[Operand]:
        """Puts a barrier before the operands of equations that are computed again on purpose.

        Without the barrier, XLA would find the first computation instead.
        """
        which = [
            i for i in range(len(operands)) if apart is True or apart is not False and apart[i]
        ]
        passed = dict(
            zip(
                which,
                self._add_equation(
                    "optimization_barrier", [operands[i] for i in which], {}, len(which)
                ),
                strict=True,
            )
        )
        return [passed.get(i, operand) for i, operand in enumerate(operands)]

    def _write_constant(self, value: Parameter) -> Operand:
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            # A key has no bytes of its own: its data is sent, and wrapped on the task.
            data = self._write_constant(jax.random.key_data(value))
            return self._add_equation(
                "random_wrap", [data], {"impl": GENERATORS.get(str(jax.random.key_impl(value)))}, 1
            )[0]
        array = np.asarray(value)
        # The reader takes no such constants. A float32 holds each of their values.
        if is_narrow(array.dtype):
            return self._add_equation(
                "convert_element_type",
                [self._write_constant(array.astype(np.float32))],
                {"new_dtype": array.dtype},
                1,
            )[0]
        if array.ndim and array.size and _is_uniform(array):
            number = self._writer.constant(array.reshape(-1)[0])
            shape = {"shape": array.shape, "broadcast_dimensions": ()}
            return self._add_equation("broadcast_in_dim", [number], shape, 1)[0]
        return self._writer.constant(array)


def _write_spec(shape: Sequence[int], dtype: DType) -> stage_pb2.TensorSpecDef:
    return stage_pb2.TensorSpecDef(shape=shape, dtype=dtype_name(canonical_dtype(dtype)))


def _is_uniform(array: Array) -> bool:
    # Bytes are compared, because NaN differs from itself and -0.0 equals 0.0.
    octets = (
        np.ascontiguousarray(array)
        .reshape(-1)
        .view(np.uint8)
        .reshape(array.size, array.dtype.itemsize)
    )
    return bool((octets == octets[0]).all())


def _close_jaxpr(jaxpr: Parameter) -> ClosedJaxpr:
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())


def _find_live(jaxpr: Jaxpr, needed: Sequence[bool]) -> list[list[bool]]:
    """Finds, for each equation, the results that are needed.

    An equation without any can be left out.
    """
    used = {
        atom
        for atom, is_needed in zip(jaxpr.outvars, needed, strict=True)
        if is_needed and isinstance(atom, Var)
    }
    live: list[list[bool]] = []
    # Backward, so that the operands of an equation that is left out are not needed either.
    for equation in reversed(jaxpr.eqns):
        live.append([var in used for var in equation.outvars])
        if any(live[-1]):
            used.update(atom for atom in equation.invars if isinstance(atom, Var))
    return live[::-1]
