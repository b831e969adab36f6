"""The image of a task for the backup, and the start of the next process of the task from the image.

An image has the variables, the run record with the leadership, the registered stages of sessions,
the last answer of each lane, and the steps that may be half done (the memory of the gate).

Queues, accumulators and quorums are not in an image, because calls wait there. A task with a queue,
an accumulator or a quorum has no backup. Tensors for other tasks and orders of a checkpoint under
way are left out, too. The steps and orders fail with AbortedError, and a session that recovers
repeats the steps.
"""

import collections
import functools
import json
import weakref
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from runtime import concurrency
from runtime.backup.holder import BackupEntry, BackupImage, Header, Json, unpacked
from runtime.backup.primary import AnsweredUpdate, CapturedEntry, LaneKey, StateCapture
from runtime.proto import stage_pb2
from runtime.state.run_record import FINISHED, LOADING
from runtime.state.store import VariableSlot
from runtime.task.registry import RegisteredCall
from runtime.task.worker import Worker
from runtime.tensor_spec import AnyArray, Array, TensorSpec
from runtime.wire.connection import Reply
from runtime.wire.messages import call_from_proto, call_to_proto

_VARIABLE, _STAGE, _ANSWER = "variable", "stage", "answer"
_SESSIONS, _RUN, _STEPS = "sessions", "run", "steps"


def capture(worker: Worker, answered: Mapping[LaneKey, AnsweredUpdate]) -> StateCapture:
    """Returns references to the state that the backup of a task needs; no update may be under way."""
    held, run, resources = worker.store.hold()
    slots = [slot for slot, _ in held]

    def release() -> None:
        worker.store.release(slots)

    # The references are released by the sender in any case.
    unusable_because = _unusable_because(run, [name for _, name in resources])
    if unusable_because:
        return StateCapture(unusable_because, {}, release)
    parts = _variables(worker, held) | _stages(worker)
    parts |= {
        _name(_ANSWER, *key): CapturedEntry(a.seq, functools.partial(_answer, a))
        for key, a in answered.items()
    }
    parts[_name(_RUN)] = CapturedEntry(json.dumps(run), functools.partial(BackupEntry, run))
    # A new object each time: the steps are always sent.
    parts[_name(_STEPS)] = CapturedEntry(
        object(), functools.partial(BackupEntry, worker.gate.state())
    )
    return StateCapture("", parts, release)


def _variables(
    worker: Worker, held: Sequence[tuple[VariableSlot, AnyArray]]
) -> dict[str, CapturedEntry]:
    kinds = {device: [d.type, d.index] for d, device in worker.devices.items()}

    def load(value: AnyArray) -> BackupEntry:
        device = kinds.get(value.device) if isinstance(value, jax.Array) else None
        return BackupEntry({"device": device}, (np.asarray(value),))

    return {
        _name(_VARIABLE, *slot.key): CapturedEntry(weakref.ref(v), functools.partial(load, v))
        for slot, v in held
    }


def _stages(worker: Worker) -> dict[str, CapturedEntry]:
    calls, unused, sessions = worker.registry.kept()
    # The calls of sessions in this process end with it.
    foreign = {handle: call for handle, call in calls.items() if call.registration.foreign}
    parts = {
        _name(_STAGE, h): CapturedEntry(h, functools.partial(_stage, call))
        for h, call in foreign.items()
    }
    parts |= {
        _name(_STAGE, h): CapturedEntry(h, functools.partial(BackupEntry, entry.meta, entry.arrays))
        for h, entry in unused.items()
    }
    listed = [[session, handles] for session, handles in sessions.items()]
    parts[_name(_SESSIONS)] = CapturedEntry(
        worker.registry.changes, functools.partial(BackupEntry, listed)
    )
    return parts


def _unusable_because(run: Mapping[str, Json], resources: Sequence[str]) -> str:
    """Returns the reason against a backup now; ``resources`` are keys of the store."""
    if run["phase"] == LOADING:
        return "its variables are being given values"
    if run["phase"] == FINISHED:
        return "training is over"
    if resources:
        # A key begins with the kind of the resource, which users do not name.
        names = sorted(key.partition(":")[2] for key in resources)
        return f"it holds {', '.join(names[:3])}, whose state is that of calls that wait"
    return ""


def take_up(worker: Worker, image: BackupImage) -> dict[LaneKey, AnsweredUpdate]:
    """Fills an empty worker from an image.

    Args:
        worker: the worker of this process.
        image: the image of an earlier process of the task.

    Returns:
        The last answer on each lane.
    """
    found: dict[str, dict[tuple[Json, ...], BackupEntry]] = collections.defaultdict(dict)
    for name, entry in image.entries.items():
        kind, *key = json.loads(name)
        found[kind][tuple(key)] = entry
    stages = {handle: entry for (handle,), entry in found[_STAGE].items()}
    sessions = dict(pair for entry in found[_SESSIONS].values() for pair in entry.meta)
    worker.registry.inherit(stages, sessions, functools.partial(_revive, worker))
    for entry in found[_STEPS].values():
        worker.gate.take_up(entry.meta)
    devices = {(d.type, d.index): device for d, device in worker.devices.items()}
    variables = found[_VARIABLE].items()
    worker.store.replace(
        {(c, n): (_placed(e, devices), TensorSpec.of(e.arrays[0])) for (c, n), e in variables}
    )
    # Tensors and checkpoint jobs of the earlier process are lost, and their callers learn the
    # reason.
    worker.rendezvous.resumed = True
    worker.checkpoint_participant.jobs.resumed = True
    for entry in found[_RUN].values():
        worker.store.run.take_up(entry.meta)
    return {(client, lane): _answered(entry) for (client, lane), entry in found[_ANSWER].items()}


def read(
    take: Callable[[Header], tuple[Header, Sequence[Array]]], task: str, process_id: int
) -> BackupImage | str:
    """Requests the backup of a task from its holder, message by message.

    Args:
        take: sends a message and returns the answer.
        task: name of the task.
        process_id: random number of this process.

    Returns:
        The image, or the reason why the holder has no usable image.
    """
    entries: dict[str, BackupEntry] = {}
    index = 0
    while True:
        header, arrays = take(
            {"kind": "take", "of": task, "process_id": process_id, "index": index}
        )
        if not header["found"]:
            return str(header["why"])
        entries |= unpacked(header["put"], arrays, copy=False)
        if not header["left"]:
            return BackupImage(header["version"], header["about"], "", entries)
        index += 1


def _name(*parts: Json) -> str:
    return json.dumps(parts)


def _placed(entry: BackupEntry, devices: Mapping[tuple[str, int], jax.Device]) -> AnyArray:
    array, device = entry.arrays[0], entry.meta["device"]
    if device is None:
        return array
    # Without 64-bit mode JAX narrows 64-bit arrays.
    with jax.enable_x64(True):
        placed: jax.Array = jax.device_put(array, devices[device[0], device[1]], may_alias=False)
        return placed.block_until_ready()


def _stage(call: RegisteredCall) -> BackupEntry:
    made = call.registration
    meta = {"generation": made.generation, "traced": made.traced, "writes": call.writes}
    return BackupEntry(
        meta, (np.frombuffer(call_to_proto(call.call).SerializeToString(), np.uint8),)
    )


def _answer(answered: AnsweredUpdate) -> BackupEntry:
    reply = answered.reply
    meta = {"seq": answered.seq, "remember": reply.remember, "dynamic": reply.dynamic}
    return BackupEntry(meta, tuple(np.asarray(b) for b in reply.buffers))


def _answered(entry: BackupEntry) -> AnsweredUpdate:
    """Returns the answer that ``_answer`` described."""
    reply = Reply(list(entry.arrays), entry.meta["remember"], entry.meta["dynamic"])
    return AnsweredUpdate(entry.meta["seq"], reply, concurrency.monotonic())


def _revive(worker: Worker, handle: int, entry: BackupEntry) -> RegisteredCall:
    call = call_from_proto(stage_pb2.StageCallDef.FromString(entry.arrays[0].tobytes()))
    # The description has the arguments of the first registration by their names.
    made = worker.registrar.register(call, **entry.meta, handle=handle, foreign=True)
    # The program is a part of the call, so that the worker need not ask for the program.
    assert made is not None
    return made
