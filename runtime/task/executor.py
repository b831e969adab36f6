"""The executor: prepares the stages of a task, and runs them on the variables of the store.

A worker prepares a stage when the stage is registered, and runs the stage in every step.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from runtime.errors import (
    OUT_OF_MEMORY,
    AbortedError,
    InternalError,
    InvalidArgumentError,
    OpError,
    ResourceExhaustedError,
    meaning,
    one_line,
)
from runtime.expressions.kinds import is_narrow
from runtime.graph.mesh import spread
from runtime.graph.tracing import needs_64_bit
from runtime.plan.plan import Stage, VariableOutput
from runtime.state.cancellation import Cancellation
from runtime.state.interrupts import uninterrupted
from runtime.state.ledger import NOBODY
from runtime.state.store import Store
from runtime.state.write_gate import WriteGate
from runtime.task.compiler import Compiler, Executable
from runtime.task.host_kernels import Context, find_kernel
from runtime.task.program_share import ProgramTurn, WatchedProgram
from runtime.task.program_watch import ProgramWatch
from runtime.task.stage_variables import StageVariables
from runtime.tensor_spec import AnyArray, Array

_process_compiler = Compiler()


@dataclass
class Executor:
    """The compiler and runner of one task's stages.

    Attributes:
        store: State of the task.
        task: Name of the task, for errors.
        devices: Local devices that stages may name, by (type, index).
        gate: Write gate, which deferred updates pass. The worker passes the gate for the other
            stages that write.
        watch: Watch over the programs of other processes.
        compiler: Cache of executables, shared by all tasks of the process.
        meshes: Number and type of the devices of each mesh on which stages run, by device name.
    """

    store: Store
    task: str
    devices: dict[tuple[str, int], jax.Device]
    gate: WriteGate
    watch: ProgramWatch
    compiler: Compiler = _process_compiler
    meshes: dict[str, str] = field(default_factory=dict)

    def find_device(self, stage: Stage) -> jax.Device | Mesh | None:
        """Returns the device of a stage; None for a stage of host kernels whose device is not here.

        Raises:
            InvalidArgumentError: The device is not here.
        """
        if mesh := stage.device.mesh:
            kind = f"{mesh.size} {mesh.devices.flat[0].platform.upper()}"
            self.meshes[f"{stage.device.type}:{stage.device.index}"] = kind
        device = mesh or self.devices.get((stage.device.type, stage.device.index))
        if device is None and not stage.host:
            have = ", ".join(f"{kind}:{i}" for kind, i in sorted(self.devices))
            raise InvalidArgumentError(
                f"no device {stage.device.type}:{stage.device.index} here, only {have}",
                task=self.task,
            )
        return device


class PreparedStage:
    """A stage that is ready to run on this task: compiled, and with its variables, so that a run looks nothing up.

    Args:
        executor: Executor of the task.
        stage: The stage.
        generation: Generation of the run record. In a later generation the stage refuses to run.
        watched: Program of the stage if another process has sent the program.
        owned: Inputs that arrive as copies. On an accelerator results take over their memory.

    Raises:
        InvalidArgumentError: The device is not here, or the program is refused.
        NotFoundError: A host kernel is not known.
    """

    def __init__(
        self,
        executor: Executor,
        stage: Stage,
        generation: int,
        watched: WatchedProgram | None,
        owned: Sequence[int],
    ) -> None:
        self.stage = stage
        self.watched = watched
        self._device = device = executor.find_device(stage)
        self._store = executor.store
        self._task = executor.task
        self.gate = executor.gate
        self._watch = executor.watch
        self._generation = generation
        self._kernels = [find_kernel(call.kernel) for call in stage.host]
        self._variables = StageVariables.find(self._store, stage)
        self._on_host = not stage.device.is_accelerator
        # Where JAX has this device only, no value can lie elsewhere, and each step saves the look.
        self._one_device = len(executor.devices) == 1 and device in (None, jax.local_devices()[0])
        arguments = () if stage.program is None else stage.program.arguments
        self._wide = needs_64_bit([s.dtype for s in arguments[len(stage.reads) :]])
        self._narrow = [i for i, s in enumerate(arguments) if is_narrow(s.dtype)]
        donated = _find_donated(stage, () if self._on_host else owned)
        self._executable = self._compiled(executor.compiler, donated)
        assert self._kernels or device is not None, "a stage without kernels needs its device"
        assert watched is None or stage.program is not None, "only a program is watched"

    def _compiled(self, compiler: Compiler, donated: Sequence[int]) -> Executable | None:
        """Returns the executable of the stage's program; None without a program, or a device."""
        program, device = self.stage.program, self._device
        if program is None or device is None:
            return None
        try:
            return compiler.executable(program, donated, device)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(
                f"the program of [{self._label}] is refused: {error.message}", task=self._task
            ) from error

    def run(
        self, inputs: Sequence[AnyArray], client: int = 0, cancelled: Cancellation | None = None
    ) -> tuple[list[AnyArray], jax.Array | None]:
        """Runs the stage.

        Args:
            inputs: One array (numpy or jax) for each input. XLA reads numpy arrays with an
                alignment of 64 bytes in place, so the arrays must not change until the outputs are
                ready.
            client: Session of the run.
            cancelled: End of the waits of host kernels.

        Returns:
            One array for each output, and the argument of ``wait``. The outputs are numpy arrays,
            or jax arrays that may still be computed. No output shares memory with the inputs.

        Raises:
            AbortedError: The variables were restored since the stage was registered. Or variables
                have lost their values with a program that failed, now or before; the error names
                them.
            ResourceExhaustedError: The device has no memory, and no variable has lost its value. Or
                the client is above its share of the task.
            FailedPreconditionError: A variable is not initialised; the error names the variable.
            InvalidArgumentError: A variable has another shape or dtype than this graph expects.
        """
        if self._kernels:
            return self._run_host(inputs, client, cancelled or Cancellation()), None
        if self.watched is None:
            return self._run_program(inputs)
        return self._run_in_turn(self.watched, inputs, client)

    def _run_in_turn(
        self, program: WatchedProgram, inputs: Sequence[AnyArray], client: int
    ) -> tuple[list[AnyArray], jax.Array | None]:
        """Runs a program of another process. The time counts for the client.

        Raises:
            ResourceExhaustedError: The client is above its share, and nothing was run.
        """
        turn = self._watch.enter(program, client, bool(self._variables.writes))
        done = None
        try:
            outputs, done = self._run_program(inputs, turn)
            return outputs, done
        finally:
            self._watch.leave(turn, done)

    def _run_program(
        self, inputs: Sequence[AnyArray], turn: ProgramTurn | None = None
    ) -> tuple[list[AnyArray], jax.Array | None]:
        if not self._one_device:
            inputs = self.place(inputs)
        pinned: list[AnyArray] = []
        try:
            if not self._variables.slots:
                results = self._computed(inputs, turn)
            else:
                results, pinned = self._with_variables(inputs, turn)
        except OpError:
            raise
        except Exception as error:
            raise self._failed(error) from error
        # The handler of a signal has raised, and the values that were donated may be gone.
        except BaseException as error:
            self._lost(error)
            raise
        # A program returns the new values of variables first, by the order of its stage's writes.
        assert self._executable is None or len(results) > len(self._variables.writes)
        computed = results[len(self._variables.writes) :]
        done = computed[0] if computed else None
        if not pinned:
            return list(computed[: len(self.stage.outputs)]), done
        values = iter(pinned)
        outputs = [
            next(values) if isinstance(o, VariableOutput) else computed[o.index]
            for o in self.stage.outputs
        ]
        return outputs, done

    @uninterrupted
    def _with_variables(
        self, inputs: Sequence[AnyArray], turn: ProgramTurn | None
    ) -> tuple[Sequence[jax.Array], list[AnyArray]]:
        """Runs the program on its variables; returns the results, and the pinned values that are handed out."""
        variables = self._variables
        handed: list[AnyArray] = []
        try:
            # The program may run on this thread: only stages that need the same variables wait for
            # it.
            with variables.claim:
                results = self._computed(inputs, turn)
                handed = variables.exchange(results, self._store, self._task)
            return results, _pin(handed, self._on_host) if handed else []
        finally:
            if handed:
                self._store.release(variables.handed_slots)

    def _computed(
        self, inputs: Sequence[AnyArray], turn: ProgramTurn | None
    ) -> Sequence[jax.Array]:
        """Runs the program; the claim must be held."""
        # A fence that comes now does no harm: whoever gives the variables new values must claim
        # them first.
        if self._store.run.generation != self._generation:
            self.check_generation()
        if self._executable is None:
            return ()
        # A stage without variables saves the call.
        arguments = self._variables.take(self._task) if self._variables.reads else []
        if not self._one_device:
            arguments = self.place(arguments)
        # Results of fewer than 8 bits an element have another layout than a program's arguments;
        # numpy arrays fit.
        if self._narrow:
            arguments, inputs = [*arguments, *inputs], ()
            for i in self._narrow:
                arguments[i] = np.asarray(arguments[i])
        # A variable without a value has raised above, so no bytes are counted for a program that
        # does not run.
        if made := self._variables.made:
            self._store.count(made, checked=self.watched is not None)
        if turn is not None:
            turn.running = True
        # JAX would narrow numpy arrays of 64 bits outside of its 64-bit mode.
        if self._wide:
            with jax.enable_x64(True):
                return self._executable(*arguments, *inputs)
        return self._executable(*arguments, *inputs)

    def wait(self, done: jax.Array | None) -> None:
        """Waits until a run has ended, and its inputs may be overwritten.

        Args:
            done: Last value that ``run`` returned.

        Raises:
            AbortedError, ResourceExhaustedError: The program has failed, as in ``run``.
        """
        if done is None:
            return
        try:
            done.block_until_ready()
        except Exception as error:
            raise self._failed(error) from error
        finally:
            # The turn ends after a failure too, or the client's time would count on.
            if self.watched is not None:
                self._watch.finish(done)

    def place(self, values: Sequence[AnyArray]) -> list[AnyArray]:
        """Returns values on the device of this stage.

        The values elsewhere are copied together. A value may change when a run that takes the copy
        is done. On the host XLA reads numpy arrays in place.

        Raises:
            ResourceExhaustedError: The device has no memory for the values.
        """
        placed = list(values)
        away = [i for i, value in enumerate(values) if not self._is_here(value)]
        try:
            copies = _copy([values[i] for i in away], self._device) if away else []
        except Exception as error:
            raise self._failed(error) from error
        for i, copy in zip(away, copies, strict=True):
            placed[i] = copy
        return placed

    def _is_here(self, value: AnyArray) -> bool:
        if not isinstance(value, jax.Array):
            return self._on_host
        device = self._device
        home = spread(device, value.shape) if isinstance(device, Mesh) else device
        return bool(value.device == home)

    def _run_host(
        self, inputs: Sequence[AnyArray], client: int, cancelled: Cancellation
    ) -> list[AnyArray]:
        self.check_generation()
        # The program of a stage with kernels is a deferred update, which its kernel runs.
        deferred = None if self._executable is None else self
        values: list[Any] = [np.asarray(i) for i in inputs]
        for call, fn in zip(self.stage.host, self._kernels, strict=True):
            given = [values[i] for i in call.arguments]
            context = Context(
                self._store, self._task, call.attrs, given, call.op, client, cancelled, deferred
            )
            try:
                results = fn(context)
            except OpError as error:
                error.task = error.task or self._task
                raise
            if len(results) != call.results:
                raise InternalError(
                    f"kernel {call.kernel!r} gave {len(results)} results, not {call.results}"
                )
            values.extend(results)
        return [_owned(values[o.index], inputs) for o in self.stage.outputs]

    # -- the program of a deferred update, in the hands of its kernel -----------------------------

    @property
    def generation(self) -> int:
        """Generation of the task's variables, as of which the stage was registered.

        Raises:
            AbortedError: The variables were restored since then.
        """
        self.check_generation()
        return self._generation

    @uninterrupted
    def step(self) -> int:
        """Returns the value of the update's first variable, which counts its applications.

        Raises:
            AbortedError: The variables were restored since the stage was registered.
            FailedPreconditionError: The variable is not initialised.
        """
        with self._variables.claim:
            self.check_generation()
            slot, spec, _ = self._variables.reads[0]
            return int(np.asarray(slot.checked(spec, self._task)))

    @uninterrupted
    def apply(
        self,
        inputs: Sequence[AnyArray],
        key: tuple[int, int] = (0, 0),
        expected: Mapping[str, int] | None = None,
    ) -> None:
        """Passes the task's gate, runs the program, and waits for the end of the run.

        Args:
            inputs: One array for each input of the update.
            key: Name of this application in the gate.
            expected: Number of applications with this key, by task; None if there is only this one.
        """
        with self.gate.passing(key, expected):
            # The update is made of gradients of several sessions, so its time counts for none of
            # them.
            _, done = (
                self._run_in_turn(self.watched, inputs, NOBODY)
                if self.watched
                else self._run_program(inputs)
            )
            self.wait(done)

    def compute(self, inputs: Sequence[AnyArray], client: int) -> list[Array]:
        """Runs the program for a kernel, without variables; returns the results when they are computed."""
        assert not self._variables.slots, "the kernel holds the variables"
        watch, watched = self._watch, self.watched
        turn = None if watched is None else watch.enter(watched, client, updates=False)
        try:
            return [np.asarray(result) for result in self._computed(inputs, turn)]
        except Exception as error:
            raise error if isinstance(error, OpError) else self._failed(error) from error
        finally:
            if turn is not None:
                watch.leave(turn, None)

    def check_generation(self) -> None:
        """Raises AbortedError if the variables were restored since the stage was registered."""
        if self._store.run.generation != self._generation:
            raise AbortedError(
                "its variables were restored since the session began", task=self._task
            )

    def _failed(self, error: Exception) -> OpError:
        kind = meaning(error)
        text = f"running [{self._label}] on {self.stage.device.name}: {one_line(error)}"
        if kind is ResourceExhaustedError:
            text = f"{OUT_OF_MEMORY} {text}"
        if lost := self._lost(error):
            kind = AbortedError
            text = f"{text}; with it these variables have lost their values, restore or initialise them: {lost}"
        return kind(text, task=self._task)

    def _lost(self, error: BaseException) -> str:
        """Drops the values that were donated to a failed program; returns the names of their variables."""
        return ", ".join(
            self._store.drop_lost(
                self._variables.slots, f"it was lost when [{self._label}] failed: {one_line(error)}"
            )
        )

    @property
    def _label(self) -> str:
        return ", ".join(self.stage.operations[:5])


def _pin(values: Sequence[AnyArray], on_host: bool) -> list[AnyArray]:
    """Returns values of variables that no later update changes.

    Until then an update must not donate the arrays. On the host a numpy view pins the memory
    without a copy: an update that meets a view writes elsewhere.
    """
    return [np.asarray(v) if on_host else v.copy() for v in values]


def _copy(values: Sequence[AnyArray], device: jax.Device | Mesh | None) -> list[jax.Array]:
    with jax.enable_x64(True):
        if isinstance(device, Mesh):
            homes = [spread(device, value.shape) for value in values]
            # A value that is whole on each device of a mesh comes from the host once.
            first = device.devices.flat[0]
            on_way = [first if home.is_fully_replicated else home for home in homes]
            values = jax.device_put(values, on_way, may_alias=False)
            here: list[jax.Array] = jax.device_put(values, homes)
        else:
            here = jax.device_put(values, device, may_alias=False)
    return here


def _find_donated(stage: Stage, owned: Sequence[int]) -> list[int]:
    """Finds the arguments of a stage's program whose memory the results take over."""
    # An update reuses the memory of the old value. A variable that is only read keeps its own.
    donated = [k for k, i in enumerate(stage.reads) if i in stage.writes]
    if stage.program is not None and not stage.host:
        free = Counter(stage.program.results[len(stage.writes) :])
        for k in (len(stage.reads) + i for i in owned):
            # JAX warns of memory that fits no result.
            if free[stage.program.arguments[k]]:
                free[stage.program.arguments[k]] -= 1
                donated.append(k)
    return donated


def _owned(output: AnyArray, inputs: Sequence[AnyArray]) -> AnyArray:
    """Returns an output of a host stage in memory of its own.

    The output outlives the call: another stage fetches the output, or the reply keeps it. A kernel
    may have returned an input, and the inputs lie in the buffer of a connection, which the next
    call overwrites.
    """
    lent = (i for i in inputs if isinstance(i, np.ndarray))
    if isinstance(output, np.ndarray) and any(_shares(output, i) for i in lent):
        return output.copy()
    return output


def _shares(output: Array, lent: Array) -> bool:
    return output is lent or not output.flags.owndata and np.may_share_memory(output, lent)
