"""Stages and plans as protocol buffers and back.

The messages travel once, when a step is registered.
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from runtime.errors import InvalidArgumentError, ResourceExhaustedError
from runtime.graph.op_kinds import VariableSpec
from runtime.limits import Limits
from runtime.plan.place import Device
from runtime.plan.plan import (
    HeldOutput,
    HostCall,
    Plan,
    Program,
    ProgramOutput,
    RemoteInput,
    Stage,
    StageCall,
    VariableOutput,
)
from runtime.proto import stage_pb2 as pb
from runtime.tensor_spec import Array, TensorSpec, canonical_dtype
from runtime.wire.codec import decode_dynamic, encode_dynamic
from runtime.wire.sockets import byte_view

MOST_BYTES = (2 << 30) - (1 << 20)
"""Most bytes of the tensors of one message. Protobuf takes 2 GiB with the other fields."""


def pack(arrays: Sequence[Array]) -> bytes:
    """Returns arrays in the dynamic encoding, as one piece for a message field.

    Raises:
        ResourceExhaustedError: The arrays are larger than a gRPC message can be. Raised before any
            copy.

    Examples:
        >>> unpack(pack([np.ones(2, np.float32)]))
        [array([1., 1.], dtype=float32)]
    """
    nbytes = sum(array.nbytes for array in arrays)
    if nbytes > MOST_BYTES:
        raise ResourceExhaustedError(
            f"{nbytes:,} bytes of tensors in one message, {MOST_BYTES:,} are possible: its steps "
            "run elsewhere; "
            "open the session at a server of this process, or feed and fetch less at once"
        )
    return b"".join(map(byte_view, encode_dynamic(arrays)[0]))


def unpack(data: bytes) -> list[Array]:
    """Returns writable copies of the arrays in a field of `pack`."""
    return [np.array(a) for a in decode_dynamic(data)]


def spec_to_proto(spec: TensorSpec) -> pb.TensorSpecDef:
    """Returns the message of the shape and dtype of a tensor."""
    return pb.TensorSpecDef(shape=spec.shape, dtype=spec.name)


def spec_from_proto(message: pb.TensorSpecDef) -> TensorSpec:
    """Returns the shape and dtype of a message."""
    return TensorSpec(tuple(message.shape), canonical_dtype(message.dtype))


def device_to_proto(device: Device) -> pb.DeviceDef:
    """Returns the message of a device."""
    return pb.DeviceDef(
        job=device.job,
        task=device.task,
        type=device.type,
        index=device.index,
        platform=device.platform,
    )


def device_from_proto(message: pb.DeviceDef) -> Device:
    """Returns the device of a message."""
    return Device(message.job, message.task, message.type, message.index, message.platform)


def call_to_proto(call: StageCall, *, with_blob: bool = True) -> pb.StageCallDef:
    """Returns the message of a stage call.

    Args:
        call: Stage call.
        with_blob: True to send the program along; False sends only its SHA-256.
    """
    stage = call.stage
    message = pb.StageCallDef(
        wave=call.wave,
        inputs=call.inputs,
        outputs=call.outputs,
        remote=[pb.RemoteDef(input=i, task=r.task, slot=r.slot) for i, r in call.remote.items()],
        holds=[pb.HoldDef(output=i, count=h.times, by=sorted(h.by)) for i, h in call.holds.items()],
        replies=call.replies,
        stage=pb.StageDef(
            device=device_to_proto(stage.device),
            variables=[
                pb.VariableSpecDef(
                    name=v.name,
                    spec=spec_to_proto(TensorSpec(v.shape, v.dtype)),
                    container=v.container,
                    local=v.local,
                )
                for v in stage.variables
            ],
            reads=stage.reads,
            writes=stage.writes,
            dynamic=stage.inputs is None,
            inputs=[spec_to_proto(s) for s in stage.inputs or ()],
            outputs=[
                pb.OutputDef(is_variable=isinstance(o, VariableOutput), index=o.index)
                for o in stage.outputs
            ],
            output_specs=[spec_to_proto(s) for s in stage.output_specs or ()],
            host=[
                pb.HostCallDef(
                    kernel=h.kernel,
                    attrs_json=json.dumps(dict(h.attrs), sort_keys=True),
                    arguments=h.arguments,
                    results=h.results,
                    op=h.op,
                )
                for h in stage.host
            ],
            writes_state=stage.writes_state,
            operations=stage.operations,
        ),
    )
    if stage.program is not None:
        message.stage.program.CopyFrom(
            pb.ProgramDef(
                sha256=bytes.fromhex(stage.program.sha256),
                blob=stage.program.blob if with_blob else b"",
                arguments=[spec_to_proto(s) for s in stage.program.arguments],
                results=[spec_to_proto(s) for s in stage.program.results],
            )
        )
    return message


def _attributes_of(host: pb.HostCallDef) -> Any:
    try:
        return json.loads(host.attrs_json)
    except (ValueError, RecursionError):
        # Nesting without end in the text of another process raises RecursionError.
        raise InvalidArgumentError(
            f"the attributes of the kernel {host.kernel[:100]!r} are no JSON"
        ) from None


def call_from_proto(message: pb.StageCallDef) -> StageCall:
    """Returns the stage call of a message."""
    m = message.stage
    program = None
    if m.HasField("program"):
        program = Program(
            m.program.blob,
            tuple(spec_from_proto(s) for s in m.program.arguments),
            tuple(spec_from_proto(s) for s in m.program.results),
            sha256=m.program.sha256.hex(),
        )
    stage = Stage(
        device=device_from_proto(m.device),
        variables=tuple(
            VariableSpec(
                v.name, tuple(v.spec.shape), spec_from_proto(v.spec).dtype, v.container, v.local
            )
            for v in m.variables
        ),
        reads=tuple(m.reads),
        writes=tuple(m.writes),
        inputs=None if m.dynamic else tuple(spec_from_proto(s) for s in m.inputs),
        outputs=tuple(
            VariableOutput(o.index) if o.is_variable else ProgramOutput(o.index) for o in m.outputs
        ),
        output_specs=None if m.dynamic else tuple(spec_from_proto(s) for s in m.output_specs),
        program=program,
        host=tuple(
            HostCall(h.kernel, _attributes_of(h), tuple(h.arguments), h.results, h.op)
            for h in m.host
        ),
        writes_state=m.writes_state,
        operations=tuple(m.operations),
    )
    return StageCall(
        stage,
        message.wave,
        tuple(message.inputs),
        tuple(message.outputs),
        {r.input: RemoteInput(r.task, r.slot) for r in message.remote},
        {h.output: HeldOutput(h.count, frozenset(h.by)) for h in message.holds},
        tuple(message.replies),
    )


def plan_to_proto(plan: Plan) -> pb.PlanDef:
    """Returns the message of a plan, with its programs and constants."""
    return pb.PlanDef(
        feeds=plan.feeds,
        constants=pack(plan.constants),
        stages=[call_to_proto(c) for c in plan.stages],
        fetches=plan.fetches,
        slots=plan.slots,
        after=[pb.AfterDef(stages=stages) for stages in plan.after],
    )


def plan_from_proto(message: pb.PlanDef, limits: Limits) -> Plan:
    """Returns the plan of a message.

    Args:
        message: Message of `plan_to_proto`.
        limits: Limits of the task that runs the plan.

    Raises:
        ResourceExhaustedError: The plan has too many slots, each of which costs memory in every
            step.
        InvalidArgumentError: The number of slots is negative.
    """
    if message.slots < 0:
        raise InvalidArgumentError(f"a plan of {message.slots} slots (PlanDef.slots)")
    if message.slots > limits.plan_slots:
        raise limits.exceeded("plan_slots", f"a plan of {message.slots} slots (PlanDef.slots)")
    return Plan(
        message.feeds,
        tuple(unpack(message.constants)),
        tuple(call_from_proto(c) for c in message.stages),
        tuple(message.fetches),
        message.slots,
        tuple(tuple(m.stages) for m in message.after),
    )
