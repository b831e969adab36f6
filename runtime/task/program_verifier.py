"""The program verifier: a task refuses programs of other processes that could harm it or are not what they declare.

XLA trusts what it compiles. A module that JAX would never make can overrun memory or end the process: custom calls
whose results are smaller than what they write, calls that go in circles, sizes that overflow. So a program that came
over the wire is walked before it is compiled, and refused unless all of it is what JAX makes of a computation:

* only the operations, attributes and composites of the tables here, and no custom call;
* every value a dense array of static shape, of at most ``VALUE_BYTES``;
* calls that name a function of the module, never ``main``, and never come back to where they began;
* at most ``MODULE_BYTES`` and ``OPERATIONS``, nested and called at most ``DEPTH`` deep.

A program that this process has made itself is not walked. What the walk cannot bound is how long a program runs and
how much memory it takes.
"""

from __future__ import annotations

import graphlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import export
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from runtime.errors import InvalidArgumentError
from runtime.plan.plan import Program
from runtime.task.portable_artifact import check_frame
from runtime.tensor_spec import TensorSpec

MODULE_BYTES = 16 << 20
"""How large a program may be. Large constants travel beside it, not in it."""
OPERATIONS = 50_000
"""How many operations a program may have; those of a function count as often as it is called, as XLA copies them."""
DEPTH = 64
"""How deep loops, branches and calls may lie in each other."""
VALUE_BYTES = 16 << 30
"""How large one value of a program may be; a larger variable is partitioned."""
RANK = 64
"""How many dimensions a value may have: as many as numpy's."""
WINDOW_ELEMENTS = 1 << 24
"""How many elements the window of an operation may have."""
LARGEST_SIZE = (1 << 31) - 1
"""What a size, a stride or a padding among the attributes may be at most."""


NOT_ALLOWED = (
    "not allowed in a stage that another process sends: place what needs it on a device of the process that builds the "
    "graph"
)


def _rows(table: str) -> dict[str, frozenset[str]]:
    """Reads rows of ``operations : attributes that each of them may have``."""
    made = {}
    for row in table.strip().splitlines():
        names, _, attributes = row.partition(":")
        made.update({f"stablehlo.{name}": frozenset(attributes.split()) for name in names.split()})
    return made


ALLOWED_OPERATIONS: Mapping[str, frozenset[str]] = {
    "func.call": frozenset(["callee"]),
    "func.return": frozenset(),
    **_rows("""
        abs add and atan2 bitcast_convert ceil clamp complex convert count_leading_zeros divide floor imag is_finite
        maximum minimum multiply negate not or popcnt power real remainder round_nearest_afz round_nearest_even
        select shift_left shift_right_arithmetic shift_right_logical sign subtract xor
        cbrt cosine exponential exponential_minus_one log log_plus_one : result_accuracy
        rsqrt sine sqrt tan tanh : result_accuracy
        compare : comparison_direction compare_type
        reduce_precision : exponent_bits mantissa_bits
        broadcast_in_dim : broadcast_dimensions
        concatenate : dimension
        constant : value
        dynamic_slice : slice_sizes
        dynamic_update_slice reshape
        gather : dimension_numbers slice_sizes indices_are_sorted
        iota : iota_dimension
        pad : edge_padding_low edge_padding_high interior_padding
        reverse : dimensions
        scatter : scatter_dimension_numbers indices_are_sorted unique_indices
        slice : start_indices limit_indices strides
        transpose : permutation
        cholesky : lower
        convolution : window_strides padding lhs_dilation rhs_dilation window_reversal dimension_numbers \
feature_group_count batch_group_count precision_config
        dot_general : dot_dimension_numbers precision_config algorithm
        fft : fft_type fft_length
        reduce : dimensions
        reduce_window : window_dimensions window_strides base_dilations window_dilations padding
        select_and_scatter : window_dimensions window_strides padding
        sort : dimension is_stable
        triangular_solve : left_side lower unit_diagonal transpose_a
        case optimization_barrier return while
        composite : name decomposition version composite_attributes
        rng : rng_distribution
        rng_bit_generator : rng_algorithm
    """),
}
"""Every operation that a function may hold, with the attributes that it may have.

These are the operations that JAX makes of computations of static shape, on one device, without effects. Those for
unknown shapes (``set_dimension_size``, ``dynamic_reshape``), for several devices and for effects are not among them.
"""

ALLOWED_CUSTOM_CALLS: Mapping[str, Callable[[ir.Operation], bool]] = {}
"""Every custom call that a program may make, with what tells whether it is made with shapes that fit: none.

Their kernels, LAPACK's among them, take the shapes that the module declares for true, and write past the end of a
result that is declared too small. Nothing that this project itself places on other tasks needs one.
"""

ELEMENTWISE_COMPOSITES: Mapping[str, int] = {
    **dict.fromkeys(
        "acos acosh asin asinh atan atanh bessel_i1e conj cosh digamma erf erf_inv erfc lgamma sinh square tan".split(),
        1,
    ),
    **dict.fromkeys("next_after polygamma zeta".split(), 2),
}
"""Composites that work element by element, and how many operands they have, all of the type of the one result."""
ALLOWED_COMPOSITES = frozenset(f"chlo.{name}" for name in (*ELEMENTWISE_COMPOSITES, "top_k"))
"""Every composite that a program may hold: an operation that brings a function along which computes the same.

XLA puts a function of its own in the place of those whose names it knows, so their operands have to be right.
"""

MODULE_ATTRIBUTES = frozenset(["sym_name", "mhlo.num_partitions", "mhlo.num_replicas", "jax.uses_shape_polymorphism"])
FUNCTION_ATTRIBUTES = frozenset(["sym_name", "sym_visibility", "function_type", "arg_attrs", "res_attrs"])
ARGUMENT_ATTRIBUTES = frozenset(["jax.arg_info", "jax.result_info", "jax.global_constant"])
"""What arguments and results may have: names for people to read."""

_WINDOWED = frozenset(["stablehlo.reduce_window", "stablehlo.select_and_scatter"])
_SIZES = frozenset(
    "window_dimensions window_strides base_dilations window_dilations padding lhs_dilation rhs_dilation slice_sizes "
    "edge_padding_low edge_padding_high interior_padding start_indices limit_indices strides fft_length".split()
)
"""The attributes that are rows of sizes."""


def load_program(program: Program) -> export.Exported:
    """Reads a program, and checks that its header is of a stage and says what the stage declares.

    Raises:
        InvalidArgumentError: it is damaged, of a version that is not known here, or not what its stage declares.
    """
    try:
        exported = export.deserialize(bytearray(program.blob))
        _check_header(exported, program)
    except InvalidArgumentError:
        raise
    except Exception as error:
        raise InvalidArgumentError(f"not a program that this task can read: {_one_line(error)}") from error
    return exported


def verify_program(program: Program, value_bytes: int = VALUE_BYTES) -> None:
    """Verifies a program that another process has sent. Nothing is compiled.

    Args:
        program: the program.
        value_bytes: how large one of its values may be, in bytes.

    Raises:
        InvalidArgumentError: it is damaged, not what its stage declares, or breaks one of the rules above; names the
            operation and the rule.
    """
    if len(program.blob) > MODULE_BYTES:
        raise InvalidArgumentError(
            f"the program has {len(program.blob):,} bytes, {MODULE_BYTES:,} are allowed: feed large constants"
        )
    exported = load_program(program)
    arguments = [program.arguments[i] for i in exported.module_kept_var_idx]
    try:
        check_frame(bytes(exported.mlir_module_serialized))
        with mlir.make_ir_context() as context, ir.Location.unknown(context):
            module = stablehlo.deserialize_portable_artifact(context, exported.mlir_module_serialized)
            verify_module(module, value_bytes)
            _check_signature(module, arguments, program)
    except InvalidArgumentError:
        raise
    except Exception as error:
        raise InvalidArgumentError(f"the program's module cannot be read: {_one_line(error)}") from error


def _check_header(exported: export.Exported, program: Program) -> None:
    if exported.nr_devices != 1:
        raise InvalidArgumentError(f"a stage runs on one device, this program wants {exported.nr_devices}")
    if len(exported.platforms) != 1:
        raise InvalidArgumentError(f"a stage is for one platform, this program is for {exported.platforms}")
    if exported.ordered_effects or exported.unordered_effects:
        raise InvalidArgumentError("a stage may have no side effects (debug.print, callbacks)")
    if exported.disabled_safety_checks:
        raise InvalidArgumentError("the program was exported without JAX's safety checks")
    arguments = [(a.shape, a.dtype) for a in exported.in_avals]
    results = [(a.shape, a.dtype) for a in exported.out_avals]
    if arguments != [(s.shape, s.dtype) for s in program.arguments]:
        raise InvalidArgumentError("the program's arguments are not those that its stage declares")
    if results != [(s.shape, s.dtype) for s in program.results]:
        raise InvalidArgumentError("the program's results are not those that its stage declares")
    takes: object = exported.in_tree
    if takes != jax.tree.structure(((0,) * len(arguments), {})):
        raise InvalidArgumentError("the program's arguments are not a flat row of arrays")
    gives: object = exported.out_tree
    if gives != jax.tree.structure((0,) * len(results)):
        raise InvalidArgumentError("the program's results are not a flat row of arrays")
    kept = tuple(exported.module_kept_var_idx)
    if list(kept) != sorted(set(kept)) or any(not 0 <= i < len(arguments) for i in kept):
        raise InvalidArgumentError(f"the program keeps arguments {kept} of {len(arguments)}")


# -- the walk --------------------------------------------------------------------------------------------------------


@dataclass
class Function:
    """What the walk has seen in one function.

    Attributes:
        operations: how many there are.
        depth: how deep its regions lie in each other.
        calls: by called function, how often.
        call_depths: by called function, in how many regions its deepest call lies.
    """

    operations: int = 0
    depth: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    call_depths: dict[str, int] = field(default_factory=dict)


def verify_module(module: ir.Module, value_bytes: int = VALUE_BYTES) -> None:
    """Walks a StableHLO module.

    Args:
        module: the module, as it was read.
        value_bytes: how large one of its values may be, in bytes.

    Raises:
        InvalidArgumentError: it breaks one of the rules above; names the operation and the rule.
    """
    walk = _Walk(value_bytes)
    functions = walk.functions(module)
    check_calls(functions)
    if not module.operation.verify():
        raise InvalidArgumentError("the program's module is not valid StableHLO")


def check_calls(functions: Mapping[str, Function]) -> None:
    """Checks the calls among functions: none is to ``main``, each has a target, and they form no circle.

    Raises:
        InvalidArgumentError: one of these does not hold, or all operations, counted as often as they are called, are
            too many or nested too deeply.
    """
    for name, function in functions.items():
        for target in function.calls:
            if target == "main":
                raise InvalidArgumentError(f"operation 'func.call' in @{name} calls @main: nothing may call it")
            if target not in functions:
                raise InvalidArgumentError(f"operation 'func.call' in @{name} calls @{target}, which does not exist")
    try:
        order = list(graphlib.TopologicalSorter({n: list(f.calls) for n, f in functions.items()}).static_order())
    except graphlib.CycleError as error:
        circle = " -> ".join(f"@{name}" for name in reversed(error.args[1][:8]))
        raise InvalidArgumentError(f"operation 'func.call': calls go in a circle: {circle}") from None
    operations: dict[str, int] = {}
    depth: dict[str, int] = {}
    for name in order:  # those that are called come first
        function = functions[name]
        operations[name] = function.operations + sum(n * operations[t] for t, n in function.calls.items())
        depth[name] = max([function.depth, *(d + 1 + depth[t] for t, d in function.call_depths.items())])
        if operations[name] > OPERATIONS:
            raise InvalidArgumentError(
                f"@{name} has {operations[name]:,} operations with all that it calls, {OPERATIONS:,} are allowed"
            )
        if depth[name] > DEPTH:
            raise InvalidArgumentError(f"@{name} has regions and calls {depth[name]} deep, {DEPTH} are allowed")


class _Walk:
    """One walk over a module; knows the types that it has seen, which are few."""

    def __init__(self, value_bytes: int) -> None:
        self._value_bytes = value_bytes
        self._seen: set[ir.Type] = set()
        self._operations = 0

    def functions(self, module: ir.Module) -> dict[str, Function]:
        """Checks all operations; gives the size and the calls of each function, by name."""
        attributes = module.operation.attributes
        _check_attributes("builtin.module", attributes, MODULE_ATTRIBUTES)
        for count in ("mhlo.num_partitions", "mhlo.num_replicas"):
            if count in attributes and str(attributes[count]) != "1 : i32":
                raise InvalidArgumentError(f"attribute {count!r} is {attributes[count]}: a stage runs on one device")
        found: dict[str, Function] = {}
        for op in module.body.operations:
            name = op.operation.name
            if name != "func.func":
                raise InvalidArgumentError(f"operation {name!r} is {NOT_ALLOWED}")
            symbol = ir.StringAttr(op.operation.attributes["sym_name"]).value
            found[symbol] = self._function(op.operation)
        return found

    def _function(self, op: ir.Operation) -> Function:
        _check_attributes("func.func", op.attributes, FUNCTION_ATTRIBUTES)
        for which in ("arg_attrs", "res_attrs"):
            for named in ir.ArrayAttr(op.attributes[which]) if which in op.attributes else ():
                _check_attributes("func.func", _entries(named), ARGUMENT_ATTRIBUTES)
        signature = ir.FunctionType(ir.TypeAttr(op.attributes["function_type"]).value)
        self._check_types("func.func", [*signature.inputs, *signature.results])
        function = Function()
        self._regions(op, function, 0)
        return function

    def _regions(self, op: ir.Operation, function: Function, depth: int) -> None:
        for region in op.regions:
            blocks = list(region.blocks)
            if len(blocks) != 1:
                raise InvalidArgumentError(f"operation {op.name!r} has a region of {len(blocks)} blocks, not of one")
            if depth > DEPTH:
                raise InvalidArgumentError(f"operation {op.name!r} lies more than {DEPTH} regions deep")
            function.depth = max(function.depth, depth)
            self._check_types(op.name, [argument.type for argument in blocks[0].arguments])
            for inner in blocks[0].operations:
                self._operation(inner.operation, function, depth)

    def _operation(self, op: ir.Operation, function: Function, depth: int) -> None:
        name = op.name
        self._operations += 1
        function.operations += 1
        if self._operations > OPERATIONS:
            raise InvalidArgumentError(f"the program has more than {OPERATIONS:,} operations")
        if name == "stablehlo.custom_call":
            target = ir.StringAttr(op.attributes["call_target_name"]).value
            if not ALLOWED_CUSTOM_CALLS.get(target, _never)(op):
                raise InvalidArgumentError(f"custom call {target!r} is {NOT_ALLOWED}")
        elif name not in ALLOWED_OPERATIONS:
            raise InvalidArgumentError(f"operation {name!r} is {NOT_ALLOWED}")
        attributes = op.attributes
        if len(attributes):
            _check_attributes(name, attributes, ALLOWED_OPERATIONS[name])
            _check_sizes(name, attributes)
        self._check_types(name, [result.type for result in op.results])
        if name in _CALLS:
            target = ir.FlatSymbolRefAttr(attributes[_CALLS[name]]).value
            function.calls[target] += 1
            function.call_depths[target] = max(function.call_depths.get(target, 0), depth)
            if name == "stablehlo.composite":
                _check_composite(op)
        self._regions(op, function, depth + 1)

    def _check_types(self, name: str, types: Sequence[ir.Type]) -> None:
        for type_ in types:
            if type_ not in self._seen:
                why = _what_is_wrong(type_, self._value_bytes)
                if why:
                    raise InvalidArgumentError(f"operation {name!r} has a value of type {str(type_)[:100]}: {why}")
                self._seen.add(type_)


_CALLS = {"func.call": "callee", "stablehlo.composite": "decomposition"}
"""The operations that name a function, and the attribute that does."""


def _never(op: ir.Operation) -> bool:
    return False


def _check_attributes(name: str, found: Iterable[str], allowed: frozenset[str]) -> None:
    for attribute in found:
        if attribute not in allowed:
            raise InvalidArgumentError(f"operation {name!r}: attribute {attribute!r} is {NOT_ALLOWED}")


def _check_sizes(name: str, attributes: ir.OpAttributeMap) -> None:
    for attribute in attributes:
        if attribute not in _SIZES:
            continue
        sizes: Any = attributes[attribute]  # a row of integers, of one of several classes
        if not isinstance(sizes, ir.DenseI64ArrayAttr) and math.prod(ir.ShapedType(sizes.type).shape) > 2 * RANK:
            raise InvalidArgumentError(f"operation {name!r}: attribute {attribute!r} has more entries than dimensions")
        values = list(sizes)
        if any(abs(value) > LARGEST_SIZE for value in values):
            raise InvalidArgumentError(f"operation {name!r}: attribute {attribute!r} is more than {LARGEST_SIZE:,}")
        if attribute == "window_dimensions" and math.prod(values) > WINDOW_ELEMENTS:
            raise InvalidArgumentError(f"operation {name!r} has a window of more than {WINDOW_ELEMENTS:,} elements")


def _check_composite(op: ir.Operation) -> None:
    name = ir.StringAttr(op.attributes["name"]).value
    operands, results = [o.type for o in op.operands], [r.type for r in op.results]
    if name not in ALLOWED_COMPOSITES:
        raise InvalidArgumentError(f"composite {name!r} is {NOT_ALLOWED}")
    if name == "chlo.top_k":
        fits = _is_top_k(operands, results, _passed(op))
    else:
        wanted = ELEMENTWISE_COMPOSITES[name.removeprefix("chlo.")]
        fits = len(operands) == wanted and len(results) == 1 and set(operands) == set(results) and not _passed(op)
    if not fits:
        raise InvalidArgumentError(f"composite {name!r} does not fit its operands and results")


def _passed(op: ir.Operation) -> dict[str, str]:
    """The attributes that a composite passes to what it stands for, as they are printed."""
    if "composite_attributes" not in op.attributes:
        return {}
    return _entries(op.attributes["composite_attributes"])


def _entries(dictionary: ir.Attribute) -> dict[str, str]:
    entries: Any = ir.DictAttr(dictionary)
    return {entry.name: str(entry.attr)[:40] for entry in entries}


def _is_top_k(operands: Sequence[ir.Type], results: Sequence[ir.Type], attributes: Mapping[str, str]) -> bool:
    if len(operands) != 1 or len(results) != 2:
        return False
    given, found = operands[0], results[0]
    if not isinstance(given, ir.RankedTensorType) or not isinstance(found, ir.RankedTensorType) or not given.shape:
        return False
    *outer, length = given.shape
    k, elements = found.shape[-1] if found.shape else -1, given.element_type
    shape = [*outer, k]
    return (
        attributes == {"k": f"{k} : i64"}
        and 0 <= k <= length
        and found == ir.RankedTensorType.get(shape, elements)
        and results[1] == ir.RankedTensorType.get(shape, ir.IntegerType.get_signless(32))
        and not isinstance(elements, ir.ComplexType)
    )


def _what_is_wrong(type_: ir.Type, value_bytes: int) -> str:
    """Why a value may not be of a type; empty when it may."""
    if not isinstance(type_, ir.RankedTensorType) or type_.encoding is not None:
        return "values are dense arrays"
    if not type_.has_static_shape:
        return "shapes are known before the step runs"
    bits = _bits(type_.element_type)
    if not bits:
        return "elements are integers, floats or complex numbers"
    shape = type_.shape
    if len(shape) > RANK:
        return f"{RANK} dimensions are allowed"
    # A dimension of zero does not excuse the others: XLA multiplies some of them alone.
    if math.prod(max(1, dimension) for dimension in shape) * bits > 8 * value_bytes:
        return f"{value_bytes:,} bytes are allowed; partition a variable that is larger"
    return ""


def _bits(element: ir.Type) -> int:
    """The size of an element in bits; 0 when it is no number."""
    if isinstance(element, ir.ComplexType):
        part = element.element_type
        return 2 * part.width if isinstance(part, ir.F32Type | ir.F64Type) else 0
    if isinstance(element, ir.IntegerType):
        return element.width if element.width in (1, 2, 4, 8, 16, 32, 64) else 0
    return element.width if isinstance(element, ir.FloatType) and element.width <= 64 else 0


def _check_signature(module: ir.Module, arguments: Sequence[TensorSpec], program: Program) -> None:
    """The entry function takes and gives what the header says: XLA trusts that it does."""
    mains = [op for op in module.body.operations if str(ir.StringAttr(op.attributes["sym_name"]).value) == "main"]
    if len(mains) != 1:
        raise InvalidArgumentError(f"the program's module has {len(mains)} entry functions")
    signature = ir.FunctionType(ir.TypeAttr(mains[0].attributes["function_type"]).value)
    for what, types, specs in (("takes", signature.inputs, arguments), ("gives", signature.results, program.results)):
        wanted = [_type_of(spec) for spec in specs]
        if list(types) != wanted:
            raise InvalidArgumentError(
                f"the program's module {what} ({', '.join(map(str, types))}), its header says "
                f"({', '.join(map(str, wanted))})"
            )


def _type_of(spec: TensorSpec) -> ir.Type:
    if not jnp.issubdtype(spec.dtype, jnp.generic):
        raise InvalidArgumentError(f"an argument or result is {spec}")
    return ir.RankedTensorType.get(spec.shape, mlir.dtype_to_ir_type(spec.dtype))


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
