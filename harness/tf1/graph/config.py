"""``tf.ConfigProto`` and the messages in it: session options by TensorFlow's names, taken by the runtime as its own."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import jax
from absl import logging

import runtime as rt


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
    """Accepted, without an effect: JAX takes GPU memory by XLA_PYTHON_CLIENT_PREALLOCATE and _MEM_FRACTION."""

    defaults = {
        **dict.fromkeys(("allocator_type", "visible_device_list"), ""),
        "allow_growth": False,
        "deferred_deletion_bytes": 0,
        "per_process_gpu_memory_fraction": 0.0,
    }


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
    host devices if JAX has not started its own yet. GPU and graph options and the numbers of
    threads are accepted, without an effect. The further options are those of ``rt.SessionConfig``.
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
        """Makes as many host devices as ``device_count`` asks for, if JAX has not started yet; warns if it has."""
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
