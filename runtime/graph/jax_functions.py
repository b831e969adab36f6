"""jax.numpy, jax.nn, jax.lax and jax.random with tensors in the place of arrays, function by function on first use."""

import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy

from runtime.graph.graph import Graph, Tensor
from runtime.graph.ops import call
from runtime.graph.random import random_key


def lift(fn: Callable[..., object], name: str | None = None) -> Callable[..., Any]:
    """Returns ``fn`` for tensors.

    A call of the result adds one operation to the graph, named by ``name=``.

    Args:
        fn: A JAX function.
        name: Name of the operations; the function's own name by default.
    """
    label = name or fn.__name__

    @functools.wraps(fn)
    def lifted(*args: object, name: str | None = None, **kwargs: object) -> Any:
        return call(fn, *args, name=name or label, **kwargs)

    return lifted


class _LiftedModule(types.ModuleType):
    """A module with the lifted functions of ``source``, and with its constants and dtypes."""

    def __init__(
        self,
        name: str,
        source: types.ModuleType,
        wrap: Callable[[Callable[..., object]], Callable[..., object]] = lift,
    ) -> None:
        super().__init__(
            name,
            f"{source.__name__} for tensors: every function of it adds one operation to the graph.",
        )
        self._source = source
        self._wrap = wrap

    def __getattr__(self, name: str) -> Any:
        # The machinery of imports and of doctest asks for such names.
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            found = getattr(self._source, name)
        except AttributeError:
            raise AttributeError(f"{self._source.__name__} has no {name!r}") from None
        if isinstance(found, types.ModuleType):
            value: object = _LiftedModule(f"{self.__name__}.{name}", found, self._wrap)
        # Dtypes such as jnp.float32 are callable, and are no functions.
        elif callable(found) and not isinstance(found, type) and not hasattr(found, "dtype"):
            value = self._wrap(found)
        else:
            value = found
        # The next lookup finds the attribute, and does not come here.
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted(set(dir(self._source)))


def _lift_random(fn: Callable[..., object]) -> Callable[..., object]:
    """Lifts a sampler of jax.random.

    Without a key the sampler draws with a new key in every step.
    """
    if fn.__name__ in (
        "key",
        "PRNGKey",
        "wrap_key_data",
        "key_data",
        "split",
        "fold_in",
        "clone",
        "key_impl",
    ):
        return lift(fn)

    def sampler(
        *args: object, seed: int | None = None, name: str | None = None, **kwargs: object
    ) -> object:
        if args and isinstance(args[0], Tensor) or "key" in kwargs:
            return call(fn, *args, name=name or fn.__name__, **kwargs)
        # The key belongs to the graph of the other arguments.
        with Graph.of(*jax.tree.leaves((args, kwargs))).as_default():
            key = random_key(seed, name=f"{name or fn.__name__}/key")
            return call(fn, key, *args, name=name or fn.__name__, **kwargs)

    sampler.__doc__ = (
        f"jax.random.{fn.__name__} with a key that is new in every step unless ``key=`` is given; "
        "``seed=`` fixes its sequence."
    )
    sampler.__name__ = fn.__name__
    return sampler


numpy = _LiftedModule("runtime.numpy", jax.numpy)
nn = _LiftedModule("runtime.nn", jax.nn)
lax = _LiftedModule("runtime.lax", jax.lax)
random = _LiftedModule("runtime.random", jax.random, _lift_random)
stop_gradient = lift(jax.lax.stop_gradient, "StopGradient")
