"""What a task refuses to compile: programs that do more than compute, or are not what their stage says.

A stage comes from a peer, and compiling or running a hostile program can crash or hang the process. So a module may
hold only operations and custom calls that are named here: no host callbacks, no infeed or outfeed, no collectives, no
kernels that bring code of their own. This bounds what a program can reach; it does not bound how long it runs.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import export
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from runtime.errors import InvalidArgumentError
from runtime.plan.plan import Program

ALLOWED_OPERATIONS = frozenset(
    ["builtin.module", "func.func", "func.call", "func.return"]
    + [
        f"stablehlo.{name}"
        for name in (
            # element by element
            "abs add and atan2 bitcast_convert cbrt ceil clamp compare complex convert cosine count_leading_zeros "
            "divide exponential exponential_minus_one floor imag is_finite log log_plus_one logistic maximum minimum "
            "multiply negate not or popcnt power real reduce_precision remainder round_nearest_afz round_nearest_even "
            "rsqrt select shift_left shift_right_arithmetic shift_right_logical sign sine sqrt subtract tan tanh xor "
            "uniform_quantize uniform_dequantize "
            # shapes and places
            "broadcast broadcast_in_dim concatenate constant dynamic_broadcast_in_dim dynamic_gather dynamic_iota "
            "dynamic_pad dynamic_reshape dynamic_slice dynamic_update_slice gather get_dimension_size "
            "get_tuple_element iota pad real_dynamic_slice reshape reverse scatter set_dimension_size slice "
            "torch_index_select transpose tuple "
            # sums and products
            "batch_norm_grad batch_norm_inference batch_norm_training cholesky convolution dot dot_general "
            "dynamic_conv einsum fft map reduce reduce_window select_and_scatter sort triangular_solve unary_einsum "
            # control
            "case composite custom_call if optimization_barrier return while "
            # randomness
            "rng rng_bit_generator"
        ).split()
    ]
)
"""Every operation that a program may hold."""

_LAPACK = "potrf geqrf gesdd getrf gehrd gees geev trsm gtsv".split()
_LAPACK_REAL, _LAPACK_COMPLEX = "orgqr syevd sytrd".split(), "ungqr heevd hetrd".split()
_SOLVER = "getrf geqrf orgqr potrf syevd gesvd gesvdj gesdd sytrd".split()

ALLOWED_CUSTOM_CALLS = frozenset(
    [f"lapack_{kind}{name}_ffi" for kind in "sdcz" for name in _LAPACK]
    + [f"lapack_{kind}{name}_ffi" for kind in "sd" for name in _LAPACK_REAL]
    + [f"lapack_{kind}{name}_ffi" for kind in "cz" for name in _LAPACK_COMPLEX]
    + [
        f"{vendor}solver_{name}_ffi"
        for vendor in ("cu", "hip")
        for name in "getrf geqrf orgqr potrf syevd gesvd".split()
    ]
    + [f"{vendor}solver_{name}_ffi" for vendor in ("cu", "hip") for name in ("gesvdj", "gesdd", "sytrd")]
    + ["cu_lu_pivots_to_permutation", "hip_lu_pivots_to_permutation", "cusparse_gtsv2_ffi"]
    + ["cu_threefry2x32_ffi", "hip_threefry2x32_ffi"]
    + ["Eigh", "Qr", "ProductOfElementaryHouseholderReflectors", "LuDecomposition"]  # the TPU's own linear algebra
    + ["ApproxTopK", "AllocateBuffer"]
)
"""Every custom call that a program may make.

Those whose compatibility JAX guarantees in exported programs, without the ones that bring code along (tpu_custom_call,
mosaic_gpu_v2, tf.call_tf_function) and the ones that only programs of several devices or of unknown shapes need.
"""


def load_program(program: Program) -> export.Exported:
    """Reads a program that a peer has sent, and checks it. Nothing is compiled.

    Raises:
        InvalidArgumentError: it is damaged, of a version that is not known here, not what its stage declares, or holds
            something that is not allowed; names it.
    """
    try:
        exported = export.deserialize(bytearray(program.blob))
        flat = _checked_header(exported, program)
    except InvalidArgumentError:
        raise
    except Exception as error:
        raise InvalidArgumentError(f"not a program that this task can read: {_one_line(error)}") from error
    try:
        with mlir.make_ir_context() as context, ir.Location.unknown(context):
            module = stablehlo.deserialize_portable_artifact(context, exported.mlir_module_serialized)
            _check_operations(module)
            _check_signature(module, flat)
    except InvalidArgumentError:
        raise
    except Exception as error:
        raise InvalidArgumentError(f"the program's module cannot be read: {_one_line(error)}") from error
    return exported


def _checked_header(exported: export.Exported, program: Program) -> list[Any]:
    """Checks all but the module; gives the (shape, dtype) of the module's arguments, then of its results."""
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
    trees: tuple[Any, Any] = exported.in_tree, exported.out_tree
    if trees[0] != jax.tree.structure(((0,) * len(arguments), {})):
        raise InvalidArgumentError("the program's arguments are not a flat row of arrays")
    if trees[1] != jax.tree.structure((0,) * len(results)):
        raise InvalidArgumentError("the program's results are not a flat row of arrays")
    kept = tuple(exported.module_kept_var_idx)
    if list(kept) != sorted(set(kept)) or any(not 0 <= i < len(arguments) for i in kept):
        raise InvalidArgumentError(f"the program keeps arguments {kept} of {len(arguments)}")
    return [[arguments[i] for i in kept], results]


def _check_operations(module: ir.Module) -> None:
    refused: list[str] = []

    def visit(op: Any) -> ir.WalkResult:
        name = str(op.operation.name)
        if name not in ALLOWED_OPERATIONS:
            refused.append(f"operation {name!r}")
        elif name == "stablehlo.custom_call":
            target = ir.StringAttr(op.operation.attributes["call_target_name"]).value
            if target not in ALLOWED_CUSTOM_CALLS:
                refused.append(f"custom call {target!r}")
        return ir.WalkResult.INTERRUPT if refused else ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    if refused:
        raise InvalidArgumentError(f"{refused[0]} is not allowed in a stage")


def _check_signature(module: ir.Module, declared: list[Any]) -> None:
    """The entry function takes and gives what the header says: XLA trusts that it does."""
    mains = [op for op in module.body.operations if str(ir.StringAttr(op.attributes["sym_name"]).value) == "main"]
    if len(mains) != 1:
        raise InvalidArgumentError(f"the program's module has {len(mains)} entry functions")
    signature = ir.FunctionType(ir.TypeAttr(mains[0].attributes["function_type"]).value)
    for what, types, specs in (("takes", signature.inputs, declared[0]), ("gives", signature.results, declared[1])):
        wanted = [_type_of(shape, dtype) for shape, dtype in specs]
        if list(types) != wanted:
            raise InvalidArgumentError(
                f"the program's module {what} ({', '.join(map(str, types))}), its header says "
                f"({', '.join(map(str, wanted))})"
            )


def _type_of(shape: tuple[int, ...], dtype: Any) -> ir.Type:
    if math.prod(shape) < 0 or not jnp.issubdtype(dtype, jnp.generic):
        raise InvalidArgumentError(f"an argument or result is {dtype}{list(shape)}")
    return ir.RankedTensorType.get(shape, mlir.dtype_to_ir_type(jnp.dtype(dtype)))


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
