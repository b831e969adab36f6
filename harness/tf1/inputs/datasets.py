"""``tf.data``: datasets as generators on the client's host; the iterators are in ``harness.tf1.iterators``.

An element is a list of numpy arrays, one for each component; a dataset knows their nest, dtypes and
static shapes as TensorFlow reports them. What ``map`` and its like are given becomes a part of the
graph, which the session runs for each element.
"""

from __future__ import annotations

import glob
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import jax
import numpy as np

import runtime as rt
from harness.tf1.inputs import iterators
from harness.tf1.inputs.elements import (
    Component,
    Element,
    Nest,
    Number,
    Open,
    Opening,
    Structured,
    ahead,
    check_padded_shape,
    declared,
    flatten,
    general,
    interleaved,
    is_leaf,
    literal,
    padded_batch,
    row,
    shuffled,
    stacked,
    tensors_in,
    wanted_shape,
)
from harness.tf1.inputs.readers import fixed_length, lines
from harness.tf1.inputs.records import compression, records
from harness.tf1.ops.dtypes import as_dtype, to_array
from harness.tf1.ops.lift import is_tensor
from harness.tf1.ops.python_ops import strings
from harness.tf1.ops.shapes import TensorShape
from harness.tf1.ops.sparse import SparseTensor
from harness.tf1.ops.static import known_on_host
from harness.tf1.ops.value_ops import convert_to_tensor, placeholder
from runtime.lowlevel import Array, dtype_name

if TYPE_CHECKING:
    from jax.tree_util import PyTreeDef


def _as_scalar(argument: object) -> object:
    """Returns a number, or the tensor that has the number in the step."""
    return rt.as_tensor(argument) if is_tensor(argument) else argument


class ElementStream(Structured):
    """Elements, one after the other, and the methods that make datasets of datasets.

    Args:
        structure: of the nest of an element.
        components: the leaves.
        tensors: the tensors among the sources; opening the dataset finds their values.
        opened: gives the elements.
    """

    def __init__(
        self,
        structure: PyTreeDef,
        components: Sequence[Component],
        tensors: Sequence[rt.Tensor],
        opened: Open,
    ) -> None:
        super().__init__(structure, components)
        self.tensors = tuple(dict.fromkeys(tensors))
        self.open = opened

    def __repr__(self) -> str:
        return f"<{type(self).__name__} shapes: {self.output_shapes}, types: {self.output_types}>"

    def map(
        self,
        map_func: Callable[..., Nest],
        num_parallel_calls: object = None,
        *,
        num_threads: object = None,
        output_buffer_size: object = None,
    ) -> Dataset:
        """Applies ``map_func`` to each element.

        Args:
            map_func: takes the tensors of an element, gives a nest of tensors.
            num_parallel_calls: without an effect: ``prefetch`` is what makes elements beside the
                training.
            num_threads: the same.
            output_buffer_size: the same.
        """
        given, nest = self._trace_function(map_func, "map")
        # A list that a function returns is a tuple in TensorFlow, but a list given is one tensor.
        nest = tuple(nest) if isinstance(nest, list) else nest
        leaves, structure = flatten(nest)
        out = [convert_to_tensor(leaf) for leaf in leaves]

        def opened(opening: Opening) -> Iterator[Element]:
            for element in self.open(opening):
                yield opening.run(out, dict(zip(given, element, strict=True)))

        return Dataset(
            structure, [Component(t.dtype, TensorShape(t.shape)) for t in out], self.tensors, opened
        )

    def flat_map(self, map_func: Callable[..., Dataset]) -> Dataset:
        """Joins the datasets that ``map_func`` returns for the elements, one dataset after the other."""
        return self.interleave(map_func, 1, 1)

    def interleave(
        self,
        map_func: Callable[..., Dataset],
        cycle_length: Number = None,
        block_length: Number = 1,
        num_parallel_calls: object = None,
    ) -> Dataset:
        """Takes the elements of the datasets that ``map_func`` returns, in turn.

        Args:
            map_func: takes the tensors of an element, gives a dataset.
            cycle_length: how many datasets take turns; 1 by default.
            block_length: how many elements one gives at a time.
            num_parallel_calls: without an effect.
        """
        given, inner = self._trace_function(map_func, "flat_map")
        if not isinstance(inner, Dataset):
            raise TypeError(f"`map_func` must return a `Dataset` object. Got {type(inner)}")
        width, block = _as_scalar(cycle_length or 1), _as_scalar(block_length)

        def open_one(opening: Opening, element: Element) -> Iterator[Element]:
            known = (
                opening.run(inner.tensors, dict(zip(given, element, strict=True)))
                if inner.tensors
                else []
            )
            return inner.open(Opening(opening.place, dict(zip(inner.tensors, known, strict=True))))

        def opened(opening: Opening) -> Iterator[Element]:
            parts = (open_one(opening, element) for element in self.open(opening))
            return interleaved(parts, int(opening.value(width)), int(opening.value(block)))

        return Dataset(
            inner.structure, inner.components, [*self.tensors, *tensors_in(width, block)], opened
        )

    def filter(self, predicate: Callable[..., Nest]) -> Dataset:
        """Keeps the elements for which ``predicate``, a boolean tensor, is true."""
        given, kept = self._trace_function(predicate, "filter")
        keep = convert_to_tensor(kept)
        if keep.dtype != np.bool_ or keep.shape not in (None, ()):
            raise ValueError("`predicate` must return a scalar boolean tensor.")

        def opened(opening: Opening) -> Iterator[Element]:
            for element in self.open(opening):
                if opening.run([keep], dict(zip(given, element, strict=True)))[0]:
                    yield element

        return self._with_elements(opened)

    def _trace_function(
        self, function: Callable[..., Nest], name: str
    ) -> tuple[list[rt.Tensor], Any]:
        """Makes ``function`` a part of the graph: the tensors that stand for an element, and the results."""
        with (
            rt.name_scope(name),
            rt.control_dependencies(None),
            rt.device(None),
            rt.device("/cpu:0"),
        ):
            given = [placeholder(c.dtype, c.shape, "element") for c in self.components]
            for tensor in given:
                known_on_host(tensor.op)
            nest = self.structure.unflatten(given)
            return given, function(*nest) if type(nest) is tuple else function(nest)

    def _stream_elements(
        self, change: Callable[..., Iterator[Element]], *numbers: Number
    ) -> Dataset:
        """Makes a dataset of ``change(elements, *numbers)``."""
        given = [_as_scalar(number) for number in numbers]

        def opened(opening: Opening) -> Iterator[Element]:
            return change(self.open(opening), *(int(opening.value(number)) for number in given))

        return self._with_elements(opened, *given)

    def _with_elements(self, opened: Open, *arguments: object) -> Dataset:
        return Dataset(
            self.structure, self.components, [*self.tensors, *tensors_in(*arguments)], opened
        )

    def repeat(self, count: Number = None) -> Dataset:
        """Repeats all elements; for ever by default, or for -1."""
        times = _as_scalar(count)

        def opened(opening: Opening) -> Iterator[Element]:
            wanted = opening.value(times)
            for _ in itertools.count() if wanted is None or wanted < 0 else range(int(wanted)):
                some = False
                for element in self.open(opening):
                    some = True
                    yield element
                # TensorFlow ends an endless repetition of nothing.
                if not some:
                    return

        return self._with_elements(opened, times)

    def shuffle(
        self, buffer_size: Number, seed: Number = None, reshuffle_each_iteration: bool | None = None
    ) -> Dataset:
        """Elements in random order: each one is drawn from ``buffer_size`` of them.

        Args:
            buffer_size: how many are held.
            seed: of the draw; that of the graph by default.
            reshuffle_each_iteration: another order in each round of ``repeat``; as it is by
                default.
        """
        size, graph_seed = _as_scalar(buffer_size), rt.get_default_graph().seed
        seeds = [s for s in (graph_seed, seed) if s is not None]
        # The place of the iterator remembers the draw, because a dataset may be opened by many.
        key = object()

        def opened(opening: Opening) -> Iterator[Element]:
            memory = opening.place.memory
            drawn = memory.get(key) if reshuffle_each_iteration is not False else None
            if drawn is None:
                same = memory.setdefault((key, "same"), np.random.SeedSequence(seeds or None))
                drawn = memory[key] = np.random.default_rng(same)
            return shuffled(self.open(opening), int(opening.value(size)), drawn)

        return self._with_elements(opened, size)

    def take(self, count: Number) -> Dataset:
        """Keeps the first ``count`` elements; all for -1."""
        return self._stream_elements(
            lambda elements, most: itertools.islice(elements, None if most < 0 else most), count
        )

    def skip(self, count: Number) -> Dataset:
        """Drops the first ``count`` elements; all for -1."""
        return self._stream_elements(
            lambda elements, least: (
                iter(()) if least < 0 else itertools.islice(elements, least, None)
            ),
            count,
        )

    def shard(self, num_shards: Number, index: Number) -> Dataset:
        """Keeps every ``num_shards``-th element, from the number ``index`` on: the share of one worker.

        Raises:
            InvalidArgumentError: ``index`` is not below ``num_shards``.
        """
        known = not any(map(is_tensor, (num_shards, index)))
        if known and not 0 <= index < num_shards:
            raise rt.InvalidArgumentError(
                f"index must be at least 0 and below num_shards {num_shards}, not {index}"
            )
        return self._stream_elements(
            lambda elements, step, first: itertools.islice(elements, first, None, step),
            num_shards,
            index,
        )

    def concatenate(self, dataset: Dataset) -> Dataset:
        """Appends the elements of another dataset.

        Raises:
            TypeError: their elements differ in structure or dtypes.
        """
        if self.structure != dataset.structure or [c.dtype for c in self.components] != [
            c.dtype for c in dataset.components
        ]:
            raise TypeError(
                f"Two datasets to concatenate have different types {self.output_types} and "
                f"{dataset.output_types}"
            )

        def opened(opening: Opening) -> Iterator[Element]:
            return itertools.chain(self.open(opening), dataset.open(opening))

        both = [
            Component(a.dtype, general(a.shape, b.shape))
            for a, b in zip(self.components, dataset.components, strict=True)
        ]
        return Dataset(self.structure, both, [*self.tensors, *dataset.tensors], opened)

    def cache(self, filename: object = "") -> Dataset:
        """Keeps the elements of the first round in memory, also where a file is named."""
        key = object()

        def opened(opening: Opening) -> Iterator[Element]:
            if key in opening.place.memory:
                yield from opening.place.memory[key]
                return
            kept = []
            for element in self.open(opening):
                kept.append(element)
                yield element
            # Only a complete round is kept: a reader may leave in the middle.
            opening.place.memory[key] = kept

        return self._with_elements(opened)

    def prefetch(self, buffer_size: Number) -> Dataset:
        """Makes up to ``buffer_size`` elements ahead, in a thread of its own; 1 where none is said."""
        return self._stream_elements(
            lambda elements, size: ahead(elements, max(size, 1)),
            1 if buffer_size is None else buffer_size,
        )

    def apply(self, transformation_func: Callable[[Any], Dataset]) -> Dataset:
        """Calls a function of datasets with this dataset."""
        return transformation_func(self)

    def batch(self, batch_size: Number, drop_remainder: bool = False) -> Dataset:
        """Stacks elements; the rest at the end is a smaller batch, unless it is dropped."""
        return self._batch_elements(
            batch_size, drop_remainder, [c.shape for c in self.components], stacked
        )

    def padded_batch(
        self,
        batch_size: Number,
        padded_shapes: Nest = None,
        padding_values: Nest = None,
        drop_remainder: bool = False,
    ) -> Dataset:
        """Makes batches of elements of different sizes, each of which is padded.

        Args:
            batch_size: how many.
            padded_shapes: wanted shapes; None, or -1, for the size of the largest one.
            padding_values: what they are filled up with: 0, or "", by default.
            drop_remainder: leaves out a smaller one at the end.
        """
        count = len(self.components)
        listed = [c.shape for c in self.components]
        if padded_shapes is not None:
            listed = [wanted_shape(s) for s in self.structure.flatten_up_to(padded_shapes)]
        for component, wanted in zip(self.components, listed, strict=True):
            check_padded_shape(component.shape, wanted)
        fills = (
            [None] * count
            if padding_values is None
            else [literal(v) for v in self.structure.flatten_up_to(padding_values)]
        )

        def padded(rows: Sequence[Array], place: int) -> Array:
            component, shape = self.components[place], listed[place]
            return padded_batch(rows, shape, fills[place], component.dtype)

        return self._batch_elements(batch_size, drop_remainder, listed, padded)

    def _batch_elements(
        self,
        batch_size: Number,
        drop_remainder: bool,
        shapes: Sequence[TensorShape],
        stack: Callable[[Sequence[Array], int], Array],
    ) -> Dataset:
        size = _as_scalar(batch_size)
        if not isinstance(size, rt.Tensor) and cast(int, size) < 1:
            raise rt.InvalidArgumentError(f"batch_size must be greater than zero, not {size}")
        first = None if isinstance(size, rt.Tensor) or not drop_remainder else int(cast(int, size))
        if any(isinstance(leaf, SparseTensor) for leaf in jax.tree.leaves(self.output_classes)):
            raise TypeError(
                "batch: sparse tensors do not batch here: use tf.sparse_tensor_to_dense before"
            )

        def opened(opening: Opening) -> Iterator[Element]:
            wanted = int(opening.value(size))
            source = self.open(opening)
            while rows := list(itertools.islice(source, wanted)):
                if len(rows) < wanted and drop_remainder:
                    return
                yield [stack(column, i) for i, column in enumerate(zip(*rows, strict=True))]

        components = [
            Component(
                c.dtype, TensorShape(None) if s.dims is None else TensorShape([first, *s.as_list()])
            )
            for c, s in zip(self.components, shapes, strict=True)
        ]
        return Dataset(self.structure, components, [*self.tensors, *tensors_in(size)], opened)

    def make_one_shot_iterator(self) -> iterators.Iterator:
        """Makes an iterator that needs no initializer, and passes over the elements once.

        Raises:
            ValueError: the dataset was made from placeholders.
        """
        return iterators.one_shot(self)

    def make_initializable_iterator(self, shared_name: str | None = None) -> iterators.Iterator:
        """Makes an iterator that begins again whenever its ``initializer`` runs."""
        return iterators.initializable(self, shared_name)


class Dataset(ElementStream):
    """Elements, one after the other, made of tensors, numbers, files or a generator."""

    @staticmethod
    def from_tensors(tensors: Nest) -> Dataset:
        """Makes a dataset of one element."""
        values, components, structure, needed = _source_values(tensors)

        def opened(opening: Opening) -> Iterator[Element]:
            yield [opening.value(v) for v in values]

        return Dataset(structure, components, needed, opened)

    @staticmethod
    def from_tensor_slices(tensors: Nest) -> Dataset:
        """Makes a dataset of the slices of tensors along their first dimension.

        Raises:
            ValueError: they have none, or not all the same.
        """
        values, components, structure, needed = _source_values(tensors)
        sizes = set()
        for component in components:
            if component.shape.ndims == 0:
                raise ValueError("Dataset.from_tensor_slices: a number has no slices")
            sizes.add(None if component.shape.dims is None else component.shape.as_list()[0])
        if len(sizes - {None}) > 1:
            raise ValueError(
                f"Dataset.from_tensor_slices: first dimensions differ: {sorted(map(str, sizes))}"
            )
        parts = [
            Component(c.dtype, TensorShape(None) if c.shape.dims is None else c.shape[1:])
            for c in components
        ]

        def opened(opening: Opening) -> Iterator[Element]:
            arrays = [opening.value(v) for v in values]
            for i in range(len(arrays[0]) if arrays else 0):
                yield [np.asarray(row(a, i)) for a in arrays]

        return Dataset(structure, parts, needed, opened)

    @staticmethod
    def from_generator(
        generator: Callable[..., Nest],
        output_types: Nest,
        output_shapes: Nest = None,
        args: Sequence[rt.TensorLike] | None = None,
    ) -> Dataset:
        """Makes a dataset of the elements that a Python generator yields.

        Args:
            generator: a function that gives something to iterate over.
            output_types: dtypes of an element.
            output_shapes: static shapes; unknown by default.
            args: of ``generator``; tensors are given as arrays.
        """
        structure, components = declared(output_types, output_shapes)
        given = [convert_to_tensor(a) for a in args or ()]

        def opened(opening: Opening) -> Iterator[Element]:
            for value in generator(*(opening.known[t] for t in given)):
                yield [
                    _check_yielded(part, component)
                    for part, component in zip(
                        structure.flatten_up_to(value), components, strict=True
                    )
                ]

        return Dataset(structure, components, given, opened)

    @staticmethod
    def range(*args: Number) -> Dataset:
        """Makes a dataset of the numbers of Python's ``range``, int64."""
        numbers = [_as_scalar(a) for a in args]

        def opened(opening: Opening) -> Iterator[Element]:
            for i in range(*(int(opening.value(n)) for n in numbers)):
                yield [np.asarray(i, np.int64)]

        return _of_one(np.int64, [], tensors_in(*numbers), opened)

    @staticmethod
    def zip(datasets: Nest) -> Dataset:
        """Makes a dataset of the elements of several datasets side by side, as long as all have one."""
        parts, structure = jax.tree.flatten(datasets, is_leaf=is_leaf)
        whole = jax.tree.structure(
            jax.tree.unflatten(
                structure, [p.structure.unflatten([0] * len(p.components)) for p in parts]
            )
        )

        def opened(opening: Opening) -> Iterator[Element]:
            for elements in zip(*(part.open(opening) for part in parts), strict=False):
                yield [array for element in elements for array in element]

        components = [c for part in parts for c in part.components]
        return Dataset(whole, components, [t for part in parts for t in part.tensors], opened)

    @staticmethod
    def list_files(
        file_pattern: rt.TensorLike, shuffle: bool | None = None, seed: int | None = None
    ) -> Dataset:
        """Makes a dataset of the names of the files that match a pattern, shuffled by default.

        Raises:
            InvalidArgumentError: when it is opened, none matches.
        """
        pattern = convert_to_tensor(file_pattern)

        def opened(opening: Opening) -> Iterator[Element]:
            patterns = opening.known[pattern].ravel().tolist()
            found = sorted({path for p in patterns for path in glob.glob(p.decode())})
            if not found:
                raise rt.InvalidArgumentError(f"No files matched pattern: {patterns}")
            return ([strings([path]).reshape(())] for path in found)

        files = _of_one(object, [], [pattern], opened)
        return files if shuffle is False else files.shuffle(1 << 30, seed)


def _source_values(nest: Nest) -> tuple[list[object], list[Component], PyTreeDef, list[rt.Tensor]]:
    """Returns the leaves of a nest, their components, the structure, and the tensors among the leaves."""
    leaves, structure = flatten(nest)
    values: list[object] = []
    for leaf in leaves:
        if is_tensor(leaf) or isinstance(leaf, list) and any(is_tensor(part) for part in leaf):
            values.append(convert_to_tensor(leaf))
        else:
            array = to_array(leaf)
            values.append(
                strings(array.ravel().tolist(), array.shape) if array.dtype.kind in "SUO" else array
            )
    components = [Component(v.dtype, TensorShape(v.shape)) for v in cast("list[Array]", values)]
    return values, components, structure, list(tensors_in(*values))


def _of_one(
    dtype: object, shape: Sequence[int | None], tensors: Sequence[rt.Tensor], opened: Open
) -> Dataset:
    """Returns a dataset whose elements are one tensor."""
    return Dataset(
        jax.tree.structure(0),
        [Component(as_dtype(dtype).dtype, TensorShape(shape))],
        tensors,
        opened,
    )


def _check_yielded(value: object, component: Component) -> Array:
    try:
        if component.dtype.hasobject:
            array = np.asarray(value, object)
            array = strings(array.ravel().tolist(), array.shape)
        else:
            # TensorFlow makes an array of the declared type, so numpy cuts fractions off. A copy, as a
            # generator may yield one buffer again and again.
            array = np.array(value, component.dtype)
    except (OverflowError, TypeError, ValueError) as error:
        raise rt.InvalidArgumentError(
            f"`generator` yielded an element that could not be converted to the expected type "
            f"{dtype_name(component.dtype)}: {value!r} ({error})"
        ) from None
    if not component.shape.is_compatible_with(array.shape):
        raise rt.InvalidArgumentError(
            f"`generator` yielded an element of shape {array.shape} where an element of shape "
            f"{component.shape} was "
            "expected."
        )
    return array


class _FileDataset(Dataset):
    """The records of files, one string each.

    Args:
        filenames: a name, a list of names, a string tensor, or a dataset of names.
        read: the records of a file.
    """

    def __init__(self, filenames: Nest, read: Callable[[str], Iterator[bytes]]) -> None:
        if isinstance(filenames, Dataset):
            tensors: tuple[rt.Tensor, ...] = filenames.tensors
        else:
            names = convert_to_tensor(filenames)
            tensors = (names,)

        def opened(opening: Opening) -> Iterator[Element]:
            found = (
                [e[0] for e in filenames.open(opening)]
                if isinstance(filenames, Dataset)
                else [opening.value(names)]
            )
            for name in itertools.chain.from_iterable(array.ravel() for array in found):
                for record in read(name.decode()):
                    yield [strings([record]).reshape(())]

        one = _of_one(object, [], tensors, opened)
        super().__init__(one.structure, one.components, tensors, opened)


class TFRecordDataset(_FileDataset):
    """The records of files in TensorFlow's format.

    Args:
        filenames: a name, a list of names, a string tensor, or a dataset of names.
        compression_type: "GZIP", "ZLIB" or none.
        buffer_size: without an effect.
        num_parallel_reads: without an effect.
    """

    def __init__(
        self,
        filenames: Nest,
        compression_type: str | None = None,
        buffer_size: object = None,
        num_parallel_reads: object = None,
    ) -> None:
        kind = compression(compression_type)
        super().__init__(filenames, lambda path: (record for _, record in records(path, kind)))


class TextLineDataset(_FileDataset):
    """The lines of files.

    Args:
        filenames: a name, a list of names, a string tensor, or a dataset of names.
        compression_type: "GZIP", "ZLIB" or none.
        buffer_size: without an effect.
    """

    def __init__(
        self, filenames: Nest, compression_type: str | None = None, buffer_size: object = None
    ) -> None:
        kind = compression(compression_type)
        super().__init__(filenames, lambda path: lines(path, kind))


class FixedLengthRecordDataset(_FileDataset):
    """Records of one size.

    Args:
        filenames: a name, a list of names, a string tensor, or a dataset of names.
        record_bytes: size of a record.
        header_bytes: left out at the beginning of each file.
        footer_bytes: left out at its end.
        buffer_size: without an effect.
    """

    def __init__(
        self,
        filenames: Nest,
        record_bytes: int,
        header_bytes: int | None = None,
        footer_bytes: int | None = None,
        buffer_size: object = None,
    ) -> None:
        sizes = (record_bytes, header_bytes or 0, footer_bytes or 0)
        super().__init__(
            filenames, lambda path: (record for _, record in fixed_length(path, *sizes))
        )
