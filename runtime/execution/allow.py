"""What a task refuses to compile: operations that reach outside the program.

A stage comes from a peer, and compiling or running a hostile one can crash or hang the process. So a module may only
hold operations that compute: no host callbacks, no infeed or outfeed, no collectives, one device.
"""

from __future__ import annotations

import re

from jax import export

from runtime.errors import InvalidArgumentError

_FORBIDDEN = re.compile(
    r"\b(?:stablehlo|mhlo)\.(infeed|outfeed|send|recv|all_reduce|all_gather|all_to_all|collective_permute|"
    r"collective_broadcast|reduce_scatter|partition_id|replica_id|create_token|after_all)\b"
)
_CUSTOM_CALL = re.compile(r"stablehlo\.custom_call @([\w.$]+)|call_target_name = \"([\w.$]+)\"")
ALLOWED_CUSTOM_CALLS = re.compile(
    r"^(Sharding|SPMDFullToShardShape|SPMDShardToFullShape|shape_assertion|"
    r"(lapack|blas|hipsolver|cusolver|cu|hip|cudnn|mhlo|chlo|stablehlo|ducc|threefry|annotate|cpu)_?[\w.]*|"
    r"__gpu\$[\w.]*|tpu_custom_call|Eigh|Qr|LuDecomposition|TopK|ApproxTopK|PartialReduce|"
    r"ProductOfElementaryHouseholderReflectors|dynamic_ducc_fft|ducc_fft)$"
)
_CALLBACKS = re.compile(r"callback", re.IGNORECASE)


def check_module(exported: export.Exported) -> None:
    """Refuses a module that does more than compute.

    Raises:
        InvalidArgumentError: names what is not allowed.
    """
    if exported.nr_devices != 1:
        raise InvalidArgumentError(f"a stage runs on one device, this program wants {exported.nr_devices}")
    if exported.ordered_effects or exported.unordered_effects:
        raise InvalidArgumentError("a stage may have no side effects (debug.print, callbacks)")
    text = exported.mlir_module()
    found = _FORBIDDEN.search(text)
    if found:
        raise InvalidArgumentError(f"operation {found.group(0)!r} is not allowed in a stage")
    for match in _CUSTOM_CALL.finditer(text):
        target = match.group(1) or match.group(2)
        if _CALLBACKS.search(target) or not ALLOWED_CUSTOM_CALLS.match(target):
            raise InvalidArgumentError(f"custom call {target!r} is not allowed in a stage")
