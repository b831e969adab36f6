"""The state of a program that is drawn, and the means of all kinds of statements."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

Shape = tuple[int | str, ...]
"""Sizes; a name stands for a size that a placeholder does not tell."""
LOOP = "a loop"
"""Stands there for a loop behind the tensor."""
FLOATS = ("float32", "float64")
INTEGERS = ("int32", "int64")
LARGE = 64.0
"""Larger numbers are only passed to functions with a limit."""
NORM = "a sum or a norm of which is the same everywhere: its derivative is rounding alone"
JUMP = "a derivative that is zero, or None in TensorFlow"
ROWS = "rows of a variable, perhaps twice: TensorFlow clips the derivative of each"
PRODUCT = "products with a factor of 0, whose derivative is NaN or 0 in TensorFlow"
MARKS = {
    PRODUCT: ("tf.cumprod(",),
    NORM: ("softmax(", "l2_normalize(", "clip_by_norm("),
    JUMP: ("tf.floor(", "tf.ceil(", "tf.sign(", "tf.round(", "tf.rint(", "tf.cast(", " // "),
    ROWS: ("tf.gather(", "tf.nn.embedding_lookup("),
}
BY_RESULT = tuple(
    f"tf.{name}("
    for name in (
        *("exp", "tanh", "sigmoid", "sqrt", "rsqrt", "reciprocal", "expm1", "cumprod"),
        *("nn.relu", "nn.relu6", "nn.elu", "nn.selu", "nn.softmax", "nn.log_softmax"),
        *("reduce_max", "reduce_min", "nn.max_pool"),
    )
)
"""Functions whose derivative TensorFlow computes of the result, which may be fed."""
WORDS = ("", "a", "row", "x y", "0.5", "-3", "é")


@dataclass(frozen=True)
class Statement:
    """One statement, and the names that it binds."""

    source: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Value:
    """A tensor as far as it is known without an engine.

    Attributes:
        exact: True if its numbers hold no rounding.
        bound: the largest absolute value, at most.
        feeds: placeholders behind the tensor.
        reads: variables that its computation reads.
        writes: variables, queues and the like that its computation changes.
        ranked: False if the rank is known in the step only.
        marks: kinds of operations behind the tensor: ``NORM``, ``JUMP``, ``ROWS``, ``PRODUCT``.
    """

    name: str
    dtype: str
    shape: Shape
    exact: bool = True
    bound: float = 4.0
    feeds: frozenset[str] = frozenset()
    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()
    ranked: bool = True
    kind: str = "tensor"
    marks: frozenset[str] = frozenset()

    @property
    def static(self) -> bool:
        """True if every size is known when the graph is built."""
        return self.ranked and all(isinstance(size, int) for size in self.shape)


@dataclass(frozen=True)
class Queue:
    """A queue; ``size`` is what it holds after the steps drawn so far."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    capacity: int
    size: list[int] = field(default_factory=lambda: [0])


class Drawer:
    """Draws one program."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.statements: list[Statement] = []
        self.values: list[Value] = []
        self.placeholders: dict[str, Value] = {}
        self.variables: list[Value] = []
        self.queues: list[Queue] = []
        self.unfed: set[str] = set()
        self.derived_by_result: set[str] = set()
        self.has_averages = False
        self.has_other_slots = False
        self.together: set[frozenset[str]] = set()
        self.count = 0
        self.sizes = 0
        self.stepped = False
        self.looping = False

    def new(self, letter: str) -> str:
        """A name that no statement binds yet."""
        self.count += 1
        return f"{letter}{self.count}"

    def chance(self, share: float) -> bool:
        """True in this share of the cases."""
        return self.random.random() < share

    def say(self, source: str, *names: str) -> None:
        """Adds a statement."""
        self.statements.append(Statement(source, names))

    def numbers(self, dtype: str, shape: Iterable[int]) -> str:
        """An array of small numbers without rounding, as source."""
        sizes = list(shape)

        def nested(sizes: list[int]) -> str:
            if not sizes:
                if dtype == "bool":
                    return str(self.chance(0.5))
                if dtype == "string":
                    return repr(self.random.choice(WORDS).encode())
                if dtype in INTEGERS:
                    return str(self.random.randint(-3, 4))
                return str(self.random.randint(-8, 8) / 4)
            return "[" + ", ".join(nested(sizes[1:]) for _ in range(sizes[0])) + "]"

        of = {"bool": "bool", "string": "object"}.get(dtype, f"np.{dtype}")
        text = nested(sizes)
        if 0 in sizes:
            return f"np.zeros({sizes}, {of})"
        return f"np.array({text}, {of})"

    def pick(
        self,
        of: Callable[[Value], bool],
        beside: Iterable[Value] = (),
        large: bool = False,
    ) -> Value | None:
        """Returns a value drawn so far, newer values more often; None if no value fits."""
        found = [
            v
            for v in self.values
            if (large or v.bound <= LARGE) and of(v) and all(self.calm(v, b) for b in beside)
        ]
        if not found:
            return None
        return found[max(self.random.randrange(len(found)), self.random.randrange(len(found)))]

    def calm(self, a: Value, b: Value) -> bool:
        """True if the two may be computed in one step in any order."""
        if a.name == b.name:
            return True
        if frozenset((a.name, b.name)) in self.together:
            return True
        return not (a.writes & (b.reads | b.writes) or b.writes & (a.reads | a.writes))

    def define(
        self,
        source: str,
        dtype: str,
        shape: Shape,
        operands: Iterable[Value],
        exact: bool = False,
        bound: float = 1.0,
        ranked: bool = True,
        named: bool = True,
    ) -> Value:
        """Adds a tensor that is computed of ``operands``."""
        name = self.new("t")
        value = self.known(name, dtype, shape, operands, exact, bound, ranked)
        marks = {mark for mark, words in MARKS.items() if any(word in source for word in words)}
        value = replace(value, marks=value.marks | marks)
        if source.startswith(BY_RESULT):
            self.derived_by_result.add(name)
        text = f"{name} = {source}"
        scoped = self.chance(0.1)
        if scoped and source.startswith("tf.") and source.endswith(")") and named:
            opening = source.partition("(")[0]
            if opening in (
                "tf.tanh",
                "tf.sigmoid",
                "tf.square",
                "tf.add",
                "tf.multiply",
                "tf.identity",
            ):
                scope, own = self.random.choice(("net", "net/a", "b")), self.random.choice("xy")
                text = f'with tf.name_scope("{scope}"):\n    {name} = {source[:-1]}, name="{own}")'
                self.say(text, name)
                self.say(f"n{name} = {name}.name", f"n{name}")
                self.values.append(value)
                return value
        self.say(text, name)
        self.values.append(value)
        return value

    def known(
        self,
        name: str,
        dtype: str,
        shape: Shape,
        operands: Iterable[Value],
        exact: bool = False,
        bound: float = 1.0,
        ranked: bool = True,
    ) -> Value:
        """Returns the description of a tensor, derived from its operands."""
        of = list(operands)
        return Value(
            name,
            dtype,
            shape,
            exact and all(v.exact for v in of) and bound < 2**20,
            bound,
            frozenset().union(*(v.feeds for v in of)),
            frozenset().union(*(v.reads for v in of), {LOOP} if self.looping else ()),
            frozenset().union(*(v.writes for v in of)),
            ranked,
            marks=frozenset().union(*(v.marks for v in of)),
        )

    def shape(self, least: int = 0, most: int = 3) -> tuple[int, ...]:
        """A shape of small sizes."""
        return tuple(self.random.randint(1, 4) for _ in range(self.random.randint(least, most)))

    def dtype(self) -> str:
        """A dtype of numbers."""
        return self.random.choice(("float32",) * 8 + ("float64", "int32", "int32", "int64"))

    def add_writer(self, value: Value, *changed: Value) -> None:
        """Adds a tensor whose computation changes variables."""
        names = frozenset(v.name for v in changed)
        self.values.append(
            Value(
                value.name,
                value.dtype,
                value.shape,
                False,
                value.bound,
                value.feeds,
                value.reads | names,
                value.writes | names,
                value.ranked,
                value.kind,
                value.marks,
            )
        )


def broadcast(a: Shape, b: Shape) -> Shape | None:
    """The shape of the two together; None where they may not fit."""
    longer, shorter = (a, b) if len(a) >= len(b) else (b, a)
    out = list(longer)
    for i, size in enumerate(shorter, len(longer) - len(shorter)):
        if out[i] == 1:
            out[i] = size
        elif size not in (1, out[i]):
            return None
    return tuple(out)


def product(sizes: Iterable[int | str]) -> int:
    """The product of known sizes."""
    total = 1
    for size in sizes:
        assert isinstance(size, int)
        total *= size
    return total
