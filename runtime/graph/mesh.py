"""Meshes: the devices of a worker as one device, on which one stage runs.

Between host and mesh each device carries 1/n of an array, however many devices there are. Inside
the program XLA gathers the parameters, splits the batch, and adds the gradients.
"""

from collections.abc import Callable, Sequence

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from runtime.cluster.device_spec import MESH, DeviceSpec
from runtime.errors import InvalidArgumentError
from runtime.graph.graph import Tensor
from runtime.graph.op_kinds import Feed, Host
from runtime.graph.placement import OpInfo, current_device

_meshes: list[Mesh] = []
"""The meshes of this process by their numbers in device names."""


def mesh_device(mesh: Mesh) -> str:
    """Returns the device name of a mesh, for `device` and device functions.

    Computations on the device run on all devices of the mesh. Feeds are split on their first axis
    over the first axis of the mesh. Parameters are whole on each device, until the program applies
    a sharding constraint. Variables stay on the CPU of the task.

    Args:
        mesh: Mesh of devices of this process, such as ``jax.make_mesh((4,), ("batch",))``.

    Raises:
        InvalidArgumentError: A device of the mesh is not of this process.
        TypeError: `mesh` is not a mesh of devices.

    Examples:
        >>> import jax, runtime as rt
        >>> with rt.Graph().as_default(), rt.device(rt.mesh_device(jax.make_mesh((1,), ("batch",)))):
        ...     x = rt.placeholder("float32", [None])
        ...     total = rt.call(lambda x: x.sum(), x)
        >>> rt.Session(graph=total.graph).run(total, {x: [1.0, 2.0]})
        np.float32(3.0)
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"a mesh of devices is needed, as jax.make_mesh makes, not {type(mesh).__name__}"
        )
    if foreign := [d for d in mesh.devices.flat if d.process_index != jax.process_index()]:
        raise InvalidArgumentError(
            f"{len(foreign)} of the {mesh.size} devices of the mesh are not of this process, such "
            f"as {foreign[0]}: take jax.make_mesh(..., devices=jax.local_devices()), which has "
            f"{jax.local_device_count()}"
        )
    # The jaxprs of a graph carry no shardings, so XLA finds the shardings in between.
    mesh = Mesh(mesh.devices, mesh.axis_names)
    if mesh not in _meshes:
        _meshes.append(mesh)
    return f"/device:{MESH}:{_meshes.index(mesh)}"


def find_mesh(number: int) -> Mesh | None:
    """Returns the mesh of a device name; None if no mesh has the number."""
    return dict(enumerate(_meshes)).get(number)


def within_mesh(fn: Callable[..., object], kind: str) -> Callable[..., object]:
    """Returns a function that names the axes of the mesh on which an operation will run.

    ``jax.lax.with_sharding_constraint`` and ``jax.shard_map`` in ``fn`` need no mesh then.

    Args:
        fn: function of the operation.
        kind: type of the operation.
    """
    # Device functions are called for each operation. Without a mesh nothing is asked.
    place = DeviceSpec.parse(current_device(OpInfo(kind, kind)) if _meshes else "")
    mesh = find_mesh(place.device_index or 0) if place.device_type == MESH else None
    if mesh is None:
        return fn
    axes = mesh.abstract_mesh

    def run(*args: object, **kwargs: object) -> object:
        with jax.sharding.use_abstract_mesh(axes):
            return fn(*args, **kwargs)

    return run


def spread(mesh: Mesh, shape: Sequence[int]) -> NamedSharding:
    """Returns the sharding of an array on its way between host and mesh.

    The first axis that n devices can share is split. Without such an axis each device has a copy.
    """
    split = next((i for i, size in enumerate(shape) if size and size % mesh.size == 0), None)
    if split is None:
        return NamedSharding(mesh, PartitionSpec())
    return NamedSharding(mesh, PartitionSpec(*[None] * split, mesh.axis_names))


def shard_input(mesh: Mesh, tensor: object, shape: Sequence[int]) -> NamedSharding:
    """Returns the sharding of an input inside a program: a batch is split, a parameter is whole.

    XLA pads rows that the devices cannot share equally, and masks them in each result.
    """
    is_batch = shape and isinstance(tensor, Tensor) and isinstance(tensor.op.body, Feed | Host)
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names[0]) if is_batch else PartitionSpec())
