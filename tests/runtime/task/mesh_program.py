"""Training on a mesh beside the same training on one device; needs a process with four CPU devices of JAX."""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

import harness
import runtime as rt

Loss = Callable[..., Any]
_device_put = jax.device_put


def dropped(params: dict[str, jax.Array], key: jax.Array, x: jax.Array) -> jax.Array:
    """Returns a loss with dropout."""
    hidden = jnp.tanh(x @ params["w"])
    hidden = hidden * jax.random.bernoulli(key, 0.5, hidden.shape)
    return ((hidden @ params["v"] + params["b"]) ** 2).mean()


def constrained(params: dict[str, jax.Array], key: jax.Array, x: jax.Array) -> jax.Array:
    """Returns the same loss with parameters that the mesh divides by PartitionSpecs."""
    if jax.sharding.get_abstract_mesh().empty:
        return dropped(params, key, x)
    specs = {"w": P(None, "batch"), "v": P("batch"), "b": P()}
    return dropped(jax.lax.with_sharding_constraint(params, specs), key, x)


def mapped(params: dict[str, jax.Array], key: jax.Array, x: jax.Array) -> jax.Array:
    """Returns a loss that each device computes of its own rows."""

    def compute(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return (jnp.tanh(x @ params["w"]) @ params["v"] + params["b"]) ** 2

    if jax.sharding.get_abstract_mesh().empty:
        return compute(params, x).mean()
    average = jax.shard_map(
        lambda params, x: jax.lax.pmean(compute(params, x).mean(), "batch"),
        in_specs=(P(), P("batch")),
        out_specs=P(),
    )
    return average(params, x)


def flax_model() -> tuple[Loss, Any]:
    """Returns loss and parameters of a layer of Flax nnx."""
    graph, state = nnx.split(nnx.Linear(16, 3, rngs=nnx.Rngs(0)), nnx.Param)

    def loss(params: Any, key: jax.Array, x: jax.Array) -> jax.Array:
        return (nnx.merge(graph, params)(x) ** 2).mean()

    return loss, nnx.to_pure_dict(state)


def equinox_model() -> tuple[Loss, Any]:
    """Returns loss and parameters of a layer of Equinox."""
    params, rest = eqx.partition(eqx.nn.Linear(16, 3, key=jax.random.key(0)), eqx.is_array)

    def loss(params: Any, key: jax.Array, x: jax.Array) -> jax.Array:
        return (jax.vmap(eqx.combine(params, rest))(x) ** 2).mean()

    return loss, params


def train(
    loss_fn: Loss,
    devices: int,
    prefetch: int = 0,
    synchronous: bool = False,
    rows: int = 8,
    first: Any = None,
) -> Any:
    """Trains for six steps on so many devices; returns losses, counts of steps and parameters."""
    mesh = jax.make_mesh((devices,), ("batch",)) if devices else None
    with rt.local_cluster(ps=2, workers=1) as cluster, rt.Graph().as_default():
        me = harness.Member(cluster.cluster, "worker", 0, cluster.servers["worker", 0])
        rt.set_random_seed(3)
        with me.device(mesh=mesh):
            step = harness.get_or_create_global_step()
            first = first or {
                "w": np.linspace(-1, 1, 16 * 8, dtype=np.float32).reshape(16, 8),
                "b": np.zeros(3, np.float32),
                "v": np.ones((8, 3), np.float32),
            }
            params = rt.variables(first, name="net")
            x = rt.placeholder(jnp.float32, [None, 16], name="x")
            loss = rt.call(loss_fn, params, rt.random_key(), x, name="loss")
            optimizer: Any = harness.Optimizer(optax.adam(1e-2))
            if synchronous:
                optimizer = harness.SyncReplicas(optimizer, replicas_to_aggregate=1)
            learn = optimizer.minimize(loss, global_step=step)
        supervisor = harness.Supervisor(is_chief=True, logdir=None, global_step=step)
        config = rt.SessionConfig(prefetch=prefetch)
        with supervisor.managed_session(cluster.target, config=config) as session:
            rng = np.random.default_rng(0)
            batches = [rng.normal(size=(rows, 16)).astype(np.float32) for _ in range(6)]
            found = [session.run([learn, loss, step], {x: batch})[1:] for batch in batches]
            known = cluster.servers["worker", 0].report().devices
            kinds = [kind for name, kind in known.items() if name.startswith("MESH")]
            assert kinds == [f"{devices} CPU"] * bool(devices), known
            return [v for v, _ in found], [int(n) for _, n in found], session.run(params)


def check_training(loss_fn: Loss, **options: Any) -> None:
    """Compares meshes of two and of four devices with one device."""
    losses, steps, params = train(loss_fn, 0, **options)
    for devices in (2, 4) if loss_fn is dropped and not options else (4,):
        found = train(loss_fn, devices, **options)
        np.testing.assert_allclose(found[0], losses, rtol=1e-5)
        assert found[1] == steps and steps[-1] >= 5, found[1]
        jax.tree.map(
            lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6),
            params,
            found[2],
        )


def check_model(loss_fn: Loss, first: Any) -> None:
    """Compares a mesh with one device for a model of a library, in both kinds of training."""
    for synchronous in (False, True):
        check_training(loss_fn, first=first, synchronous=synchronous)


def check_set_mesh() -> None:
    """Trains with a mesh that the program has set for itself."""
    with jax.set_mesh(jax.make_mesh((4,), ("batch",))):
        check_training(dropped, rows=4)


def show_bytes() -> None:
    """Prints the bytes that a step copies from the host to devices, and back, by number of devices."""
    copied: collections.Counter[str] = collections.Counter()

    def put(value: Any, *arguments: Any, **options: Any) -> Any:
        placed = _device_put(value, *arguments, **options)
        for given, there in zip(jax.tree.leaves(value), jax.tree.leaves(placed), strict=True):
            if isinstance(given, np.ndarray):
                copied["in"] += sum(shard.data.nbytes for shard in there.addressable_shards)
        return placed

    def begin(self: Any) -> None:
        # JAX copies one device's array where all devices have the same.
        shards = self.addressable_shards
        copied["out"] += sum(s.data.nbytes for s in shards if s.replica_id == 0)

    jax.device_put = put
    type(jnp.zeros(())).copy_to_host_async = begin  # type: ignore[method-assign]
    for devices in (1, 4):
        copied.clear()
        train(dropped, devices)
        print(f"{devices} devices: {copied['in']} bytes in, {copied['out']} bytes out", flush=True)


def show_refusals() -> None:
    """Prints the error of each use of a mesh that a worker cannot have."""
    whole, half = jax.make_mesh((4,), ("batch",)), jax.make_mesh((2,), ("batch",))
    ones = np.ones((7, 2), np.float32)

    def build(*names: str, fn: Loss = lambda a: a + 1) -> Any:
        with rt.Graph().as_default() as graph:
            x = rt.placeholder(jnp.float32, [None, 2], name="x")
            y: Any = x
            for each in names:
                with rt.device(each):
                    y = rt.call(fn, y, name="plus")
        with rt.Session(target, graph=graph) as session:
            session.run(y, {x: ones})

    class Foreign:
        process_index, platform, id = 1, "cpu", 9

        def __str__(self) -> str:
            return "CpuDevice(id=9)"

    foreign = jax.sharding.Mesh(np.array([*jax.local_devices(), *[Foreign()] * 4]), ("batch",))
    tries: dict[str, Callable[[], object]] = {
        "rows": lambda: build(
            rt.mesh_device(whole),
            fn=lambda a: jax.shard_map(jnp.sin, in_specs=P("batch"), out_specs=P("batch"))(a),
        ),
        "ps": lambda: build(f"/job:ps/task:0{rt.mesh_device(whole)}"),
        "two": lambda: build(rt.mesh_device(half), rt.mesh_device(whole)),
        "number": lambda: build("/device:MESH:99"),
        "foreign": lambda: rt.mesh_device(foreign),
        "kind": lambda: rt.mesh_device(4),  # type: ignore[arg-type]
        "none": lambda: build("/cpu:0", "/cpu:1"),
    }
    with rt.local_cluster(ps=1, workers=1) as cluster:
        target = cluster.target
        for name, attempt in tries.items():
            try:
                attempt()
            except (rt.InvalidArgumentError, TypeError) as error:
                print(f"{name}: {error}", flush=True)


if __name__ == "__main__":
    assert jax.local_device_count() == 4, "XLA_FLAGS=--xla_force_host_platform_device_count=4"
    {
        "asynchronous": lambda: check_training(dropped),
        "pipelined": lambda: check_training(dropped, prefetch=1),
        "synchronous": lambda: check_training(dropped, synchronous=True),
        "set": check_set_mesh,
        "uneven": lambda: check_training(dropped, rows=7),
        "constrained": lambda: check_training(constrained),
        "mapped": lambda: check_training(mapped),
        "nnx": lambda: check_model(*flax_model()),
        "equinox": lambda: check_model(*equinox_model()),
        "bytes": show_bytes,
        "refusals": show_refusals,
    }[sys.argv[1]]()
