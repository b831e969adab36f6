"""``tf.ConfigProto`` and the messages in it: session options by TensorFlow's names, taken by the runtime as its own."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any

import jax
from absl import logging

import runtime as rt

GPU_PLATFORMS = ("gpu", "cuda", "rocm")
"""JAX's names of the platform of a GPU, which depend on the maker."""


class _Options:
    """Options without an effect here.

    Any may be set; an option that is not set has TensorFlow's default.
    """

    defaults: Mapping[str, Any] = {}

    # Only names that were not set come here, so a set option goes before its default.
    def __getattr__(self, name: str) -> Any:
        try:
            return self.defaults[name]
        except KeyError:
            raise AttributeError(
                f"{type(self).__name__} has no {name!r}, and it was not set"
            ) from None

    def __init__(self, **options: Any) -> None:
        self.__dict__.update(options)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in vars(self).items())})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    __hash__ = None  # type: ignore[assignment]


class GPUOptions(_Options):
    """The GPUs, and the part of their memory, that JAX takes when it starts.

    ``allow_growth``, ``per_process_gpu_memory_fraction`` and ``visible_device_list`` have an effect.
    """

    defaults = {
        **dict.fromkeys(("allocator_type", "visible_device_list"), ""),
        "allow_growth": False,
        "deferred_deletion_bytes": 0,
        "per_process_gpu_memory_fraction": 0.0,
    }

    def apply(self) -> None:
        """Sets the variables of JAX and CUDA that the environment lacks; warns if JAX has started on a GPU."""
        wanted = {
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false" if self.allow_growth else "",
            "XLA_CLIENT_MEM_FRACTION": str(self.per_process_gpu_memory_fraction or ""),
            "CUDA_VISIBLE_DEVICES": self.visible_device_list,
        }
        # JAX does not start where the old name of the fraction is set beside the new name.
        if "XLA_PYTHON_CLIENT_MEM_FRACTION" in os.environ:
            del wanted["XLA_CLIENT_MEM_FRACTION"]
        lacking = {
            name: value for name, value in wanted.items() if value and name not in os.environ
        }
        if not lacking:
            return
        if not _jax_has_started():
            os.environ.update(lacking)
        elif any(device.platform in GPU_PLATFORMS for device in jax.local_devices()):
            logging.log_first_n(
                logging.WARNING,
                "gpu_options come too late, because JAX has started: start the program with %s, or "
                "make the first session before JAX computes",
                1,
                " ".join(f"{name}={value}" for name, value in lacking.items()),
            )


def _jax_has_started() -> bool:
    # JAX says so only by its refusal of another number of devices.
    count = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
    try:
        jax.config.update("jax_num_cpu_devices", count + 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", count)
    return False


class OptimizerOptions(_Options):
    """Accepted, without an effect: XLA compiles every step."""

    L0, L1, OFF, ON_1, ON_2 = -1, 0, -1, 1, 2
    defaults = dict.fromkeys(
        ("do_common_subexpression_elimination", "do_constant_folding", "do_function_inlining"),
        False,
    ) | {"global_jit_level": 0, "opt_level": 0}


class GraphOptions(_Options):
    """Accepted, without an effect: XLA compiles every step."""

    def __init__(self, **options: Any) -> None:
        self.optimizer_options = OptimizerOptions()
        super().__init__(**options)


class ConfigProto(rt.SessionConfig):
    """Session options, which may be changed until a session is made.

    ``operation_timeout_in_ms`` bounds the wait for the tasks to join, too. ``device_count`` makes
    host devices if JAX has not started its own yet, and until then ``gpu_options`` have an effect.
    Graph options and the numbers of threads are accepted, without an effect. The further options
    are those of ``rt.SessionConfig``.
    """

    def __init__(
        self,
        *,
        allow_soft_placement: bool = False,
        log_device_placement: bool = False,
        device_filters: Any = (),
        operation_timeout_in_ms: int = 0,
        device_count: dict[str, int] | None = None,
        gpu_options: GPUOptions | None = None,
        graph_options: GraphOptions | None = None,
        intra_op_parallelism_threads: int = 0,
        inter_op_parallelism_threads: int = 0,
        use_per_session_threads: bool = False,
        isolate_session_state: bool = False,
        start_timeout_secs: float | None = None,
        operation_timeout_secs: float | None = None,
        reconnect_secs: float = 10.0,
        **options: Any,
    ) -> None:
        if isolate_session_state:
            raise ValueError(
                "isolate_session_state is not possible on a server: use a session with the target "
                "''"
            )
        # TensorFlow's 0 means no limit of its own.
        limit = operation_timeout_in_ms / 1000 or operation_timeout_secs
        super().__init__(
            allow_soft_placement=allow_soft_placement,
            log_device_placement=log_device_placement,
            device_filters=list(device_filters),
            start_timeout_secs=limit if start_timeout_secs is None else start_timeout_secs,
            operation_timeout_secs=limit,
            reconnect_secs=reconnect_secs,
            **options,
        )
        self.device_count = device_count or {}
        self.gpu_options = gpu_options or GPUOptions()
        self.graph_options = graph_options or GraphOptions()
        self.intra_op_parallelism_threads = intra_op_parallelism_threads
        self.inter_op_parallelism_threads = inter_op_parallelism_threads
        self.use_per_session_threads = use_per_session_threads

    # The options of the runtime are frozen; scripts set fields of this message one by one.
    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        object.__delattr__(self, name)

    @property
    def operation_timeout_in_ms(self) -> int:
        """Time limit of a step in milliseconds; 0 for none."""
        return round((self.operation_timeout_secs or 0) * 1000)

    @operation_timeout_in_ms.setter
    def operation_timeout_in_ms(self, value: int) -> None:
        self.operation_timeout_secs = self.start_timeout_secs = value / 1000 or None  # type: ignore[misc]

    def CopyFrom(self, other: ConfigProto) -> None:
        """Takes over all options of another one."""
        # A message is copied deeply: later changes of the other one must not be seen here.
        self.__dict__.update(copy.deepcopy(vars(other)))

    def apply(self) -> None:
        """Gives JAX ``device_count`` and ``gpu_options``, if JAX has not started yet; warns if it has."""
        self.gpu_options.apply()
        wanted = self.device_count.get("CPU", 0)
        if wanted <= 1:
            return
        try:
            jax.config.update("jax_num_cpu_devices", wanted)
        # JAX makes its devices once, so a program that used JAX before keeps what it has.
        except RuntimeError:
            have = len(jax.local_devices(backend="cpu"))
            if have < wanted:
                logging.warning(
                    "device_count asks for %d CPUs, but JAX has started with %d", wanted, have
                )


def apply(config: Any) -> Any:
    """Does what a ``ConfigProto`` says about this process, and gives ``config`` back."""
    if isinstance(config, ConfigProto):
        config.apply()
    return config
