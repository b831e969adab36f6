"""Draws small programs of TensorFlow 1, each from its seed: what ``running`` gives to two engines.

A program is a list of statements of Python. They may use ``tf``, ``np``, the open session ``sess``
and the names of statements before. A program is drawn so that TensorFlow's result does not depend
on chance or on the last digits: two operations of a step never race for a variable, what jumps
(a floor, a comparison) is computed of numbers without rounding, and nothing grows without limit.
What docs/tf1_differences.md tells of is not drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

Shape = tuple[int | str, ...]
"""Sizes; a name stands for a size that a placeholder does not tell."""


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


DERIVATIVE = "a derivative"
"""Stands in ``Value.reads`` for a derivative behind the tensor."""

LOOP = "a loop"
"""Stands there for a loop behind the tensor."""

FLOATS = ("float32", "float64")
INTEGERS = ("int32", "int64")
LARGE = 64.0
"""Larger numbers are only passed to functions with a limit."""

UNARY: tuple[tuple[str, Callable[[float], float]], ...] = (
    ("tf.tanh({})", lambda b: 1),
    ("tf.sigmoid({})", lambda b: 1),
    ("tf.nn.relu({})", lambda b: b),
    ("tf.nn.relu6({})", lambda b: 6),
    ("tf.nn.softplus({})", lambda b: b + 1),
    ("tf.nn.softsign({})", lambda b: 1),
    ("tf.nn.elu({})", lambda b: b),
    ("tf.nn.leaky_relu({})", lambda b: b),
    ("tf.nn.selu({})", lambda b: 2 * b),
    ("tf.abs({})", lambda b: b),
    ("tf.negative({})", lambda b: b),
    ("-{}", lambda b: b),
    ("tf.square({})", lambda b: b * b),
    ("{} * {}", lambda b: b * b),
    ("tf.exp(tf.tanh({}))", lambda b: 3),
    ("tf.log(tf.square({}) + 1.0)", lambda b: b),
    ("tf.log1p(tf.abs({}))", lambda b: b),
    ("tf.expm1(tf.tanh({}))", lambda b: 3),
    ("tf.sqrt(tf.square({}) + 1.0)", lambda b: b + 1),
    ("tf.rsqrt(tf.square({}) + 1.0)", lambda b: 1),
    ("tf.reciprocal(tf.square({}) + 1.0)", lambda b: 1),
    ("1.0 / (tf.abs({}) + 0.5)", lambda b: 2),
    ("tf.sin({})", lambda b: 1),
    ("tf.cos({})", lambda b: 1),
    ("tf.erf({})", lambda b: 1),
    ("tf.atan({})", lambda b: 2),
    ("tf.pow(tf.abs({}) + 0.5, 1.5)", lambda b: (b + 1) ** 1.5),
    ("tf.identity({})", lambda b: b),
    ("tf.stop_gradient({})", lambda b: b),
    ("tf.clip_by_value({}, -2.0, 2.0)", lambda b: 2),
    ("2.0 - {}", lambda b: b + 2),
    ("{} ** 2", lambda b: b * b),
    ("abs({})", lambda b: b),
    ("tf.scalar_mul(0.5, {})", lambda b: b),
    ("tf.add_n([{}, {}])", lambda b: 2 * b),
    ("tf.check_numerics({}, 'not finite')", lambda b: b),
    ("tf.Print({}, [], '')", lambda b: b),
    ("tf.clip_by_norm({}, 1.5)", lambda b: 2),
    ("tf.cumsum({}, 0, exclusive=True)", lambda b: 8 * b),
    ("tf.py_func(lambda a: a, [{}], tf.float32)", lambda b: b),
)
LIMITED = tuple(u for u in UNARY if u[1](1e6) <= 6)

BINARY: tuple[tuple[str, Callable[[float, float], float], bool], ...] = (
    ("{} + {}", lambda a, b: a + b, True),
    ("{} - {}", lambda a, b: a + b, True),
    ("{} * {}", lambda a, b: a * b, True),
    ("tf.add({}, {})", lambda a, b: a + b, True),
    ("tf.subtract({}, {})", lambda a, b: a + b, True),
    ("tf.multiply({}, {})", lambda a, b: a * b, True),
    ("tf.maximum({}, {})", max, True),
    ("tf.minimum({}, {})", max, True),
    ("tf.squared_difference({}, {})", lambda a, b: (a + b) ** 2, True),
    ("tf.atan2({}, tf.abs({}) + 1.0)", lambda a, b: 2, False),
    ("{} / (tf.square({}) + 1.0)", lambda a, b: a, False),
    ("tf.divide({}, tf.abs({}) + 1.0)", lambda a, b: a, False),
)
INTEGER_BINARY = (
    *(row[:2] for row in BINARY[:8]),
    ("{} // (tf.abs({}) + 1)", lambda a, b: a),
    ("{} % (tf.abs({}) + 1)", lambda a, b: b + 1),
    ("tf.floordiv({}, tf.abs({}) + 2)", lambda a, b: a),
    ("tf.mod({}, tf.abs({}) + 3)", lambda a, b: b + 3),
    ("tf.truncatediv({}, tf.abs({}) + 1)", lambda a, b: a),
)
JUMPS = ("tf.floor", "tf.ceil", "tf.sign", "tf.round", "tf.rint")
COMPARE = (
    "tf.greater({}, {})",
    "tf.less_equal({}, {})",
    "tf.equal({}, {})",
    "tf.not_equal({}, {})",
    "{} < {}",
    "{} >= {}",
)
REDUCE = ("sum", "mean", "max", "min", "logsumexp", "prod")
OPTIMIZERS = (
    "tf.train.GradientDescentOptimizer(0.125)",
    "tf.train.MomentumOptimizer(0.125, 0.5)",
    "tf.train.MomentumOptimizer(0.125, 0.5, use_nesterov=True)",
    "tf.train.AdamOptimizer(0.125)",
    "tf.train.AdagradOptimizer(0.125)",
    "tf.train.RMSPropOptimizer(0.125)",
    "tf.train.RMSPropOptimizer(0.125, momentum=0.5)",
    "tf.train.AdadeltaOptimizer(0.5)",
    "tf.train.GradientDescentOptimizer(tf.train.exponential_decay(0.5, step, 2, 0.5, staircase=True))",
)
WORDS = ("", "a", "row", "x y", "0.5", "-3", "é")


class Drawer:
    """Draws one program."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.statements: list[Statement] = []
        self.values: list[Value] = []
        self.placeholders: dict[str, Value] = {}
        self.variables: list[Value] = []
        self.queues: list[Queue] = []
        self.together: set[frozenset[str]] = set()
        self.count = 0
        self.sizes = 0
        self.stepped = False
        self.looping = False

    # -- what all of them use

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
        )

    def shape(self, least: int = 0, most: int = 3) -> tuple[int, ...]:
        """A shape of small sizes."""
        return tuple(self.random.randint(1, 4) for _ in range(self.random.randint(least, most)))

    def dtype(self) -> str:
        """A dtype of numbers."""
        return self.random.choice(("float32",) * 8 + ("float64", "int32", "int32", "int64"))

    # -- sources

    def placeholder(self) -> None:
        """A placeholder, most often with a size that is not known."""
        dtype = self.random.choice((self.dtype(), self.dtype(), self.dtype(), "bool", "float32"))
        known = self.shape(0, 2)
        shape: Shape = known
        ranked = True
        if self.chance(0.7):
            if self.chance(0.5) and self.sizes:
                size = f"n{self.random.randint(1, self.sizes)}"
            else:
                self.sizes += 1
                size = f"n{self.sizes}"
            shape = (size, *known)
            ranked = self.chance(0.9)
        name = self.new("p")
        static = [None if isinstance(s, str) else s for s in shape] if ranked else None
        value = Value(name, dtype, shape, feeds=frozenset([name]), ranked=ranked)
        given = f"tf.{dtype}" + ("" if static is None else f", {static}")
        self.say(f'{name} = tf.placeholder({given}, name="{name}")', name)
        self.placeholders[name] = value
        self.values.append(value)

    def placeholder_with_default(self) -> None:
        """A placeholder that need not be fed."""
        dtype, known = self.dtype(), self.shape(0, 2)
        name = self.new("p")
        self.say(
            f"{name} = tf.placeholder_with_default({self.numbers(dtype, known)}, {list(known)})",
            name,
        )
        self.placeholders[name] = Value(name, dtype, known)
        self.values.append(Value(name, dtype, known))

    def constant(self) -> None:
        """A constant, or a tensor of its shape alone."""
        dtype, shape = self.dtype(), self.shape()
        literal = [
            f"tf.constant({self.numbers(dtype, shape)})",
            f"tf.zeros({list(shape)}, tf.{dtype})",
            f"tf.ones({list(shape)}, tf.{dtype})",
            f"tf.fill({list(shape)}, tf.constant(2, tf.{dtype}))",
            f"tf.convert_to_tensor({self.numbers(dtype, shape)})",
        ]
        self.define(self.random.choice(literal), dtype, shape, [], True, 4)

    def variable(self) -> None:
        """A variable, by one of the two ways."""
        dtype = self.random.choice(("float32",) * 6 + ("float64", "int32", "int64"))
        shape = self.shape(0, 2)
        name = self.new("v")
        numbers = self.numbers(dtype, shape)
        train = self.random.choice(("", "", "", ", trainable=False"))
        way = self.random.randrange(4)
        if way == 0:
            source = f"tf.Variable({numbers}{train})"
        elif way == 1:
            source = f'tf.Variable({numbers}{train}, name="w")'
        elif way == 2:
            source = f'tf.get_variable("{name}", {list(shape)}, tf.{dtype}, tf.constant_initializer(2){train})'
        else:
            source = f'tf.get_variable("{name}", initializer={numbers}{train})'
        text = f"{name} = {source}"
        if self.chance(0.3):
            scope = self.random.choice(("net", "net/a", "b"))
            text = f'with tf.variable_scope("{scope}"):\n    {text}'
        self.say(text, name)
        self.say(f"n{name} = {name}.name", f"n{name}")
        value = Value(
            name, dtype, shape, reads=frozenset([name]), kind="fixed" if train else "variable"
        )
        self.variables.append(value)
        self.values.append(value)

    def reuse(self) -> None:
        """A variable that is got a second time, by reuse."""
        name = self.new("v")
        scope = self.new("s")
        reuse = self.random.choice(("reuse=True", "reuse=tf.AUTO_REUSE"))
        self.say(
            f'with tf.variable_scope("{scope}"):\n'
            f'    {name} = tf.get_variable("w", [2], initializer=tf.ones_initializer())\n'
            f'with tf.variable_scope("{scope}", {reuse}):\n'
            f'    {name}b = tf.get_variable("w", [2])\n'
            f"same{name} = {name} is {name}b",
            name,
            f"same{name}",
        )
        value = Value(name, "float32", (2,), reads=frozenset([name]), kind="variable")
        self.variables.append(value)
        self.values.append(value)

    # -- arithmetic

    def unary(self) -> None:
        """A function of one tensor."""
        x = self.pick(lambda v: v.dtype in FLOATS, large=True)
        if x is None:
            return
        source, bound = self.random.choice(UNARY if x.bound <= LARGE else LIMITED)
        if "cumsum" in source and (not x.shape or not x.ranked):
            return
        if "py_func" in source:
            source = source.replace("tf.float32", f"tf.{x.dtype}")
        exact = source in (
            "tf.nn.relu({})",
            "tf.abs({})",
            "-{}",
            "tf.negative({})",
            "tf.square({})",
        )
        ranked = x.ranked and "py_func" not in source
        self.define(
            source.replace("{}", x.name), x.dtype, x.shape, [x], exact, bound(x.bound), ranked
        )

    def binary(self) -> None:
        """A function of two tensors of one dtype, whose shapes fit."""
        x = self.pick(lambda v: v.dtype in FLOATS + INTEGERS and v.bound < 40)
        if x is None:
            return
        y = self.pick(
            lambda v: (
                v.dtype == x.dtype and v.bound < 40 and broadcast(x.shape, v.shape) is not None
            ),
            [x],
        )
        if y is None:
            return
        if x.dtype in INTEGERS:
            source, bound = self.random.choice(INTEGER_BINARY)
            exact = True
        else:
            source, bound, exact = self.random.choice(BINARY)
        shape = broadcast(x.shape, y.shape)
        assert shape is not None
        self.define(
            source.format(x.name, y.name),
            x.dtype,
            shape,
            [x, y],
            exact,
            float(bound(x.bound, y.bound)),
            x.ranked and y.ranked,
        )

    def literal_binary(self) -> None:
        """A tensor beside a Python number."""
        x = self.pick(lambda v: v.dtype in FLOATS + INTEGERS and v.bound < 40)
        if x is None:
            return
        if x.dtype in INTEGERS:
            source = self.random.choice(
                ("{} + 2", "3 - {}", "{} * 2", "{} // 2", "{} % 3", "-{}", "abs({})")
            )
        else:
            source = self.random.choice(
                (
                    "{} + 1",
                    "1.5 - {}",
                    "{} * 0.5",
                    "{} / 2.0",
                    "2 * {}",
                    "{} // 0.5",
                    "-{}",
                    "abs({})",
                )
            )
            if "//" in source and not x.exact:
                return
        self.define(source.format(x.name), x.dtype, x.shape, [x], True, 3 * x.bound + 3, x.ranked)

    def jump(self) -> None:
        """A function that jumps."""
        x = self.pick(lambda v: v.dtype in FLOATS and v.exact)
        if x is not None:
            source = f"{self.random.choice(JUMPS)}({x.name})"
            self.define(source, x.dtype, x.shape, [x], True, x.bound + 1, x.ranked)

    def compare(self) -> None:
        """A comparison, or logic of two of them."""
        x = self.pick(lambda v: v.exact and v.dtype != "string")
        if x is None:
            return
        y = self.pick(
            lambda v: v.exact and v.dtype == x.dtype and broadcast(x.shape, v.shape) is not None,
            [x],
        )
        if y is None:
            return
        shape = broadcast(x.shape, y.shape)
        assert shape is not None
        if x.dtype == "bool":
            source = self.random.choice(
                (
                    "tf.logical_and({}, {})",
                    "tf.logical_or({}, {})",
                    "tf.logical_xor({}, {})",
                    "{} & {}",
                    "{} | {}",
                )
            )
        else:
            source = self.random.choice(COMPARE)
        self.define(
            source.format(x.name, y.name), "bool", shape, [x, y], True, 1, x.ranked and y.ranked
        )

    def cast(self) -> None:
        """Another dtype."""
        x = self.pick(lambda v: v.exact and v.dtype != "string")
        if x is None:
            return
        dtype = self.random.choice(("float32", "float32", "float64", "int32", "int64", "bool"))
        self.define(f"tf.cast({x.name}, tf.{dtype})", dtype, x.shape, [x], True, x.bound, x.ranked)

    def choose(self) -> None:
        """``tf.where`` of a condition and two tensors."""
        p = self.pick(lambda v: v.dtype == "bool" and v.ranked)
        if p is None:
            return
        x = self.pick(lambda v: v.shape == p.shape and v.dtype in FLOATS + INTEGERS, [p])
        if x is None:
            return
        y = self.pick(lambda v: v.shape == p.shape and v.dtype == x.dtype, [p, x])
        if y is not None:
            self.define(
                f"tf.where({p.name}, {x.name}, {y.name})",
                x.dtype,
                x.shape,
                [p, x, y],
                True,
                max(x.bound, y.bound),
                x.ranked and y.ranked,
            )

    # -- axes

    def reduce(self) -> None:
        """A sum, mean or the like over some axes or all."""
        x = self.pick(lambda v: v.dtype != "string" and v.bound < 32)
        if x is None:
            return
        keep = self.random.choice(("", ", keepdims=True", ", keep_dims=True"))
        axes = [] if not x.ranked else [i for i in range(len(x.shape)) if self.chance(0.5)]
        shape: Shape = tuple(
            1 if i in axes else s for i, s in enumerate(x.shape) if i not in axes or keep
        )
        if axes:
            told = [i - len(x.shape) if self.chance(0.3) else i for i in axes]
            axis = f", {told[0] if len(told) == 1 and self.chance(0.5) else told}"
        else:
            axis, shape = "", (1,) * len(x.shape) if keep else ()
        ranked = x.ranked or not keep
        if x.dtype == "bool":
            what = self.random.choice(("all", "any"))
            bound = 1.0
        else:
            what = self.random.choice(REDUCE if x.dtype in FLOATS else REDUCE[:4])
            bound = {
                "sum": x.bound * 64,
                "prod": min(x.bound, 2) ** 8,
                "logsumexp": x.bound + 4,
            }.get(what, x.bound)
            if what == "prod" and x.bound > 2:
                return
        exact = what in ("sum", "max", "min", "all", "any") or x.dtype in INTEGERS
        self.define(
            f"tf.reduce_{what}({x.name}{axis}{keep})", x.dtype, shape, [x], exact, bound, ranked
        )

    def arg(self) -> None:
        """The place of the largest or smallest."""
        x = self.pick(
            lambda v: v.dtype in FLOATS + INTEGERS and v.exact and v.ranked and bool(v.shape)
        )
        if x is None:
            return
        axis = self.random.randrange(len(x.shape))
        what = self.random.choice(("argmax", "argmin"))
        out = self.random.choice(("int64", "int32"))
        more = "" if out == "int64" else ", output_type=tf.int32"
        shape = x.shape[:axis] + x.shape[axis + 1 :]
        self.define(f"tf.{what}({x.name}, {axis}{more})", out, shape, [x], True, 8)

    def along(self) -> None:
        """A function along an axis that keeps the shape."""
        x = self.pick(lambda v: v.dtype == "float32" and v.ranked and bool(v.shape) and v.bound < 8)
        if x is None:
            return
        axis = self.random.randrange(len(x.shape))
        last = f"tf.nn.softmax({x.name})", f"tf.nn.log_softmax({x.name})"
        sources = [
            (f"tf.nn.softmax({x.name}, {axis})", 1, False),
            (last[0], 1, False),
            (last[1], 24, False),
            (f"tf.cumsum({x.name}, {axis})", x.bound * 8, True),
            (f"tf.cumsum({x.name}, {axis}, reverse=True)", x.bound * 8, True),
            (f"tf.cumprod(tf.tanh({x.name}), {axis})", 1, False),
            (f"tf.reverse({x.name}, [{axis}])", x.bound, True),
            (f"tf.nn.l2_normalize({x.name} + 3.0, {axis})", 1, False),
        ]
        source, bound, exact = self.random.choice(sources)
        self.define(source, x.dtype, x.shape, [x], exact, bound)

    def matrix(self) -> None:
        """A product of matrices."""
        x = self.pick(
            lambda v: v.dtype in FLOATS and len(v.shape) == 2 and v.ranked and v.bound < 8
        )
        if x is None:
            return
        y = self.pick(
            lambda v: (
                v.dtype == x.dtype
                and len(v.shape) == 2
                and v.ranked
                and v.bound < 8
                and (x.shape[1] in v.shape or x.shape[0] in v.shape)
            ),
            [x],
        )
        if y is None:
            return
        a, b = self.chance(0.3), self.chance(0.3)
        left, right = x.shape[::-1] if a else x.shape, y.shape[::-1] if b else y.shape
        if left[1] != right[0]:
            return
        flags = (", transpose_a=True" if a else "") + (", transpose_b=True" if b else "")
        source = f"tf.matmul({x.name}, {y.name}{flags})"
        if not flags and self.chance(0.2):
            source = self.random.choice(
                (
                    f"tf.tensordot({x.name}, {y.name}, 1)",
                    f"tf.einsum('ij,jk->ik', {x.name}, {y.name})",
                )
            )
        self.define(source, x.dtype, (left[0], right[1]), [x, y], True, x.bound * y.bound * 5)

    def layout(self) -> None:
        """Another shape of the same numbers."""
        x = self.pick(lambda v: v.dtype != "string" and v.ranked)
        if x is None:
            return
        rank = len(x.shape)
        n = x.name
        way = self.random.randrange(9)
        if way == 0 and rank >= 2:
            perm = self.random.sample(range(rank), rank)
            self.same(f"tf.transpose({n}, {perm})", x, tuple(x.shape[i] for i in perm))
        elif way == 1 and rank >= 2:
            self.same(f"tf.transpose({n})", x, x.shape[::-1])
        elif way == 2:
            axis = self.random.randint(-rank - 1, rank)
            at = axis if axis >= 0 else axis + rank + 1
            self.same(f"tf.expand_dims({n}, {axis})", x, (*x.shape[:at], 1, *x.shape[at:]))
        elif way == 3 and 1 in x.shape and x.static:
            self.same(f"tf.squeeze({n})", x, tuple(s for s in x.shape if s != 1))
        elif way == 4 and rank >= 2 and all(isinstance(s, int) for s in x.shape[1:]):
            rest = product(x.shape[1:])
            source = self.random.choice(
                (
                    f"tf.reshape({n}, [-1, {rest}])",
                    f"tf.reshape({n}, [tf.shape({n})[0], {rest}])",
                    f"tf.reshape({n}, tf.stack([tf.shape({n})[0], -1]))",
                )
            )
            self.same(source, x, (x.shape[0], rest))
        elif way == 5 and x.static:
            self.same(f"tf.reshape({n}, [-1])", x, (product(x.shape),))
        elif way == 6:
            y = self.pick(lambda v: v.dtype == x.dtype and v.shape == x.shape and v.ranked, [x])
            if y is None:
                return
            axis = self.random.randint(0, rank)
            self.define(
                f"tf.stack([{n}, {y.name}], {axis})",
                x.dtype,
                (*x.shape[:axis], 2, *x.shape[axis:]),
                [x, y],
                True,
                max(x.bound, y.bound),
            )
        elif way == 7 and rank:
            axis = self.random.randrange(rank)
            y = self.pick(
                lambda v: (
                    v.dtype == x.dtype
                    and v.ranked
                    and len(v.shape) == rank
                    and isinstance(v.shape[axis], int)
                    and all(
                        i == axis or a == b
                        for i, (a, b) in enumerate(zip(v.shape, x.shape, strict=True))
                    )
                ),
                [x],
            )
            size = x.shape[axis]
            if y is None or not isinstance(size, int):
                return
            other = y.shape[axis]
            assert isinstance(other, int)
            shape = (*x.shape[:axis], size + other, *x.shape[axis + 1 :])
            self.define(
                f"tf.concat([{n}, {y.name}], {axis})",
                x.dtype,
                shape,
                [x, y],
                True,
                max(x.bound, y.bound),
            )
        elif way == 8 and rank and x.dtype != "bool":
            axis = self.random.randrange(rank)
            before = self.random.randint(0, 2)
            pads = [[0, 0]] * rank
            pads[axis] = [before, 1]
            size = x.shape[axis]
            if isinstance(size, int):
                shape = (*x.shape[:axis], size + before + 1, *x.shape[axis + 1 :])
                self.same(f"tf.pad({n}, {pads})", x, shape)

    def same(self, source: str, x: Value, shape: Shape) -> None:
        """A tensor with the numbers of another."""
        self.define(source, x.dtype, shape, [x], True, x.bound)

    def take(self) -> None:
        """A part of a tensor."""
        x = self.pick(lambda v: v.dtype != "string" and v.ranked and bool(v.shape))
        if x is None:
            return
        n, first = x.name, x.shape[0]
        if not isinstance(first, int):
            if len(x.shape) > 1 and isinstance(x.shape[1], int):
                at = self.random.randrange(-x.shape[1], x.shape[1])
                self.same(f"{n}[:, {at}]", x, (first, *x.shape[2:]))
            return
        at = self.random.randrange(first)
        size = self.random.randint(1, first - at)
        rest = x.shape[1:]
        way = self.random.randrange(9)
        if way == 0:
            self.same(f"{n}[{self.random.choice((at, at - first))}]", x, rest)
        elif way == 1:
            self.same(f"{n}[{at}:{at + size}]", x, (size, *rest))
        elif way == 2:
            self.same(f"{n}[::-1]", x, x.shape)
        elif way == 3:
            self.same(f"{n}[::2]", x, ((first + 1) // 2, *rest))
        elif way == 4:
            self.same(f"{n}[tf.newaxis, ..., tf.newaxis]", x, (1, *x.shape, 1))
        elif way == 5:
            many = [self.random.randrange(first) for _ in range(self.random.randint(1, 4))]
            source = self.random.choice(
                (f"tf.gather({n}, {many})", f"tf.gather({n}, tf.constant({many}, tf.int64))")
            )
            if x.dtype in FLOATS and self.chance(0.5):
                source = f"tf.nn.embedding_lookup({n}, {many})"
            self.same(source, x, (len(many), *rest))
        elif way == 6:
            begin, sizes = [at] + [0] * len(rest), [size] + [-1] * len(rest)
            self.same(f"tf.slice({n}, {begin}, {sizes})", x, (size, *rest))
        elif way == 7 and first > 1:
            cut = self.random.randint(1, first - 1)
            name = self.new("t")
            self.say(f"{name}, {name}b = tf.split({n}, [{cut}, {first - cut}])", name, f"{name}b")
            self.values.append(self.known(name, x.dtype, (cut, *rest), [x], True, x.bound))
            self.values.append(
                self.known(f"{name}b", x.dtype, (first - cut, *rest), [x], True, x.bound)
            )
        elif way == 8:
            times = self.random.randint(1, 3)
            multiples = [times] + [1] * len(rest)
            self.same(f"tf.tile({n}, {multiples})", x, (first * times, *rest))

    def sizes_of(self) -> None:
        """Draws an operation on the shape of a tensor."""
        # A static shape is a constant in TensorFlow alone: what changes a variable is not run for it.
        x = self.pick(lambda v: v.dtype != "string" and not v.writes)
        if x is None:
            return
        n, rank = x.name, len(x.shape)
        way = self.random.randrange(6)
        if way == 0:
            if x.ranked:
                self.define(f"tf.shape({n})", "int32", (rank,), [x], True, 100)
        elif way == 1:
            self.define(f"tf.size({n})", "int32", (), [x], True, 200)
        elif way == 2:
            self.define(f"tf.rank({n})", "int32", (), [x], True, 4)
        elif way == 3:
            self.define(f"tf.zeros_like({n})", x.dtype, x.shape, [x], True, 1, x.ranked)
        elif way == 4 and x.dtype != "bool":
            self.define(f"tf.ones_like({n})", x.dtype, x.shape, [x], True, 1, x.ranked)
        elif way == 5 and x.ranked and rank:
            self.define(
                f"tf.fill([tf.shape({n})[0], 2], 1.5)", "float32", (x.shape[0], 2), [x], True, 2
            )

    def classes(self) -> None:
        """Integers as classes: one row for each."""
        x = self.pick(lambda v: v.dtype in INTEGERS and v.exact and v.ranked and len(v.shape) < 3)
        if x is not None:
            way = self.random.choice(
                (f"tf.one_hot({x.name}, 3)", f"tf.one_hot({x.name}, 3, 2.0, -1.0)")
            )
            self.define(way, "float32", (*x.shape, 3), [x], True, 2)

    def loss(self) -> None:
        """A loss with classes."""
        x = self.pick(
            lambda v: v.dtype == "float32" and len(v.shape) == 2 and v.ranked and v.bound < 20
        )
        if x is None or not isinstance(x.shape[1], int):
            return
        rows, width = x.shape
        y = self.pick(lambda v: v.dtype == "float32" and v.shape == x.shape and v.ranked, [x])
        n = x.name
        if y is not None and self.chance(0.6):
            source, shape = self.random.choice(
                (
                    (
                        f"tf.nn.softmax_cross_entropy_with_logits(labels=tf.nn.softmax({y.name}), logits={n})",
                        (rows,),
                    ),
                    (
                        f"tf.nn.sigmoid_cross_entropy_with_logits(labels=tf.sigmoid({y.name}), logits={n})",
                        x.shape,
                    ),
                    (f"tf.losses.mean_squared_error({y.name}, {n})", ()),
                    (f"tf.losses.absolute_difference({y.name}, {n})", ()),
                    (f"tf.losses.huber_loss({y.name}, {n})", ()),
                    (f"tf.nn.l2_loss({n} - {y.name})", ()),
                )
            )
            self.define(source, "float32", shape, [x, y], False, 200)
        else:
            labels = f"tf.zeros([tf.shape({n})[0]], tf.int32)"
            self.define(
                f"tf.nn.sparse_softmax_cross_entropy_with_logits(labels={labels}, logits={n})",
                "float32",
                (rows,),
                [x],
                False,
                50,
            )

    def images(self) -> None:
        """A convolution, or a window of a pool, of pictures."""
        x = self.pick(
            lambda v: (
                v.dtype == "float32"
                and v.ranked
                and v.bound < 8
                and 2 <= len(v.shape) <= 3
                and v.static
            )
        )
        if x is None:
            return
        n, height, width = x.name, int(x.shape[-2]), int(x.shape[-1])
        pictures = f"tf.reshape({n}, [-1, {height}, {width}, 1])"
        rows = product(x.shape[:-2])
        padding = self.random.choice(("SAME", "VALID"))
        window, stride = self.random.randint(1, 2), self.random.randint(1, 2)
        if padding == "VALID" and window > min(height, width):
            return
        if padding == "SAME":
            sizes = -(-height // stride), -(-width // stride)
        else:
            sizes = (height - window) // stride + 1, (width - window) // stride + 1
        kernel = self.numbers("float32", (window, window, 1, 2))
        strides = [1, stride, stride, 1]
        source, depth, exact = self.random.choice(
            (
                (f"tf.nn.conv2d({pictures}, {kernel}, {strides}, '{padding}')", 2, True),
                (
                    f"tf.nn.max_pool({pictures}, [1, {window}, {window}, 1], {strides}, '{padding}')",
                    1,
                    True,
                ),
                (
                    f"tf.nn.avg_pool({pictures}, [1, {window}, {window}, 1], {strides}, '{padding}')",
                    1,
                    False,
                ),
            )
        )
        self.define(source, "float32", (rows, *sizes, depth), [x], exact, x.bound * 8)

    def several(self) -> None:
        """A function with two results."""
        x = self.pick(lambda v: v.dtype == "float32" and v.ranked and bool(v.shape) and v.bound < 8)
        if x is None:
            return
        name, n = self.new("t"), x.name
        last = x.shape[-1]
        rest: Shape = x.shape[1:]
        way = self.random.randrange(4)
        if way == 0:
            self.say(f"{name}, {name}b = tf.nn.moments({n}, [0])", name, f"{name}b")
            shapes = rest, rest
        elif way == 1 and isinstance(last, int) and x.exact and last == 1:
            self.say(f"{name}, {name}b = tf.nn.top_k({n}, 1)", name, f"{name}b")
            self.values.append(self.known(name, x.dtype, x.shape, [x], True, x.bound))
            return
        elif way == 2:
            self.say(f"{name}, {name}b = tf.tuple([{n}, {n} * 2.0])", name, f"{name}b")
            shapes = x.shape, x.shape
        elif way == 3:
            self.say(
                f"({name}, {name}b), norm{name} = tf.clip_by_global_norm([{n}, {n} + 1.0], 2.0)",
                name,
                f"{name}b",
                f"norm{name}",
            )
            shapes = x.shape, x.shape
        else:
            return
        for each, shape in zip((name, f"{name}b"), shapes, strict=True):
            self.values.append(self.known(each, x.dtype, shape, [x], False, 4 * x.bound))

    def placed(self) -> None:
        """Draws an operation that moves numbers to other places."""
        x = self.pick(
            lambda v: v.dtype in FLOATS + INTEGERS and v.ranked and v.static and bool(v.shape)
        )
        if x is None:
            return
        n, rank = x.name, len(x.shape)
        first, last = int(x.shape[0]), int(x.shape[-1])
        rest = x.shape[1:]
        many = [self.random.randrange(3) for _ in range(first)]
        options: list[tuple[str, Shape]] = [
            (f"tf.unsorted_segment_sum({n}, {many}, 3)", (3, *rest)),
            (f"tf.scatter_nd({[[i] for i in many]}, {n}, {[3, *rest]})", (3, *rest)),
            (f"tf.gather_nd({n}, [[0], [{first - 1}]])", (2, *rest)),
            (f"tf.broadcast_to({n}, {[2, *x.shape]})", (2, *x.shape)),
            (f"tf.unstack({n})[{first - 1}]", rest),
            (f"tf.split({n}, {first})[0]", (1, *rest)),
            (f"tf.tile({n}, tf.ones([{rank}], tf.int32) * 2)", tuple(2 * int(s) for s in x.shape)),
            (f"tf.gather({n}, [0, {last - 1}], axis={rank - 1})", (*x.shape[:-1], 2)),
            (f"tf.reverse_sequence({n}, {[1] * first}, 1, 0)", x.shape),
            (f"tf.where({[i > 0 for i in many]}, {n}, tf.zeros_like({n}))", x.shape),
            (f"{n}[..., -1]", x.shape[:-1]),
            (f"{n}[tf.constant({first - 1})]", rest),
            (f"tf.strided_slice({n}, [0], [{first}], [1])", x.shape),
            (f"tf.roll({n}, 1, 0)", x.shape),
        ]
        if rank == 1:
            options = [o for o in options if "reverse_sequence" not in o[0]]
            options += [
                (f"tf.diag({n})", (first, first)),
                (f"tf.meshgrid({n}, {n})[0]", (first, first)),
                (f"tf.matrix_diag({n})", (first, first)),
            ]
        if rank == 2:
            options += [
                (f"tf.matrix_band_part({n}, 0, -1)", x.shape),
                (f"tf.matrix_transpose({n})", x.shape[::-1]),
                (f"tf.matrix_diag_part({n})", (min(first, last),)),
                (f"tf.pad({n}, [[0, 0], [1, 1]], 'SYMMETRIC')", (first, last + 2)),
                (f"tf.eye({first}, {last}, dtype=tf.{x.dtype}) + {n}", x.shape),
            ]
        source, shape = self.random.choice([o for o in options if "roll" not in o[0]])
        self.define(source, x.dtype, shape, [x], True, x.bound * 4)

    def counted(self) -> None:
        """Draws an operation on lengths and places."""
        n = self.random.randint(1, 5)
        lengths = [self.random.randint(0, 4) for _ in range(n)]
        source, dtype, shape = self.random.choice(
            (
                (f"tf.range({n})", "int32", (n,)),
                (f"tf.range(1.0, {n + 1}.0)", "float32", (n,)),
                (f"tf.linspace(0.0, 1.0, {n})", "float32", (n,)),
                (f"tf.sequence_mask({lengths}, 4)", "bool", (n, 4)),
                (f"tf.invert_permutation({self.random.sample(range(n), n)})", "int32", (n,)),
                (f"tf.count_nonzero({lengths})", "int64", ()),
                (f"tf.eye({n})", "float32", (n, n)),
                (f"tf.cumsum({lengths})", "int32", (n,)),
                (f"tf.one_hot({lengths}, 4, axis=0)", "float32", (4, n)),
            )
        )
        self.define(source, dtype, shape, [], "linspace" not in source, 24)

    def looked_up(self) -> None:
        """Rows of a variable by computed places, and the derivative by the variable."""
        tables = [v for v in self.variables if v.dtype == "float32" and len(v.shape) >= 1]
        if not tables:
            return
        v = self.random.choice(tables)
        ids = self.pick(lambda u: u.dtype in INTEGERS and u.ranked and u.exact and len(u.shape) < 3)
        if ids is None:
            return
        places = f"tf.abs({ids.name}) % {v.shape[0]}"
        source = self.random.choice(
            (f"tf.gather({v.name}, {places})", f"tf.nn.embedding_lookup({v.name}, {places})")
        )
        self.define(source, v.dtype, (*ids.shape, *v.shape[1:]), [v, ids], True, v.bound)

    def asked(self) -> None:
        """Questions about variables."""
        if not self.variables:
            return
        v = self.random.choice(self.variables)
        name = self.new("ask")
        source = self.random.choice(
            (
                f"sess.run(tf.is_variable_initialized({v.name}))",
                "[x.name for x in tf.global_variables()]",
                "[x.name for x in tf.trainable_variables()]",
                f"{v.name}.get_shape().as_list()",
                f"tf.as_dtype({v.name}.dtype).base_dtype.name",
                f"{v.name}.op.name",
                "len(tf.get_collection(tf.GraphKeys.GLOBAL_VARIABLES))",
                "tf.get_variable_scope().name",
                "sorted(sess.run(tf.report_uninitialized_variables()).tolist())",
            )
        )
        self.say(f"{name} = {source}", name)

    def scopes(self) -> None:
        """Variables in nested scopes, by names that repeat."""
        name = self.new("v")
        outer = self.random.choice(("net", "net/a", "b"))
        inner = self.random.choice(('"in"', 'None, default_name="in"', '"in", reuse=tf.AUTO_REUSE'))
        make = self.random.choice(
            (
                'tf.Variable([1.0, 2.0], name="w")',
                'tf.get_variable("w", [2], initializer=tf.ones_initializer())',
            )
        )
        text = (
            f'with tf.variable_scope("{outer}", reuse=tf.AUTO_REUSE) as scope:\n'
            f"    with tf.variable_scope({inner}):\n"
            f"        {name} = {make}\n"
            f"        n{name} = [{name}.name, tf.identity({name}, name='x').name, tf.get_variable_scope().name]\n"
        )
        if self.chance(0.5):
            text += (
                f"with tf.variable_scope(scope):\n    n{name}b = [tf.zeros([], name='z').name, scope.name, "
                "scope.original_name_scope]"
            )
            self.say(text, name, f"n{name}", f"n{name}b")
        else:
            self.say(text, name, f"n{name}")
        # AUTO_REUSE may find the variable of another statement, so no later statement changes it.

    def saved(self) -> None:
        """Variables that are saved, changed and restored."""
        if not self.variables or not self.stepped:
            return
        v = self.random.choice(self.variables)
        name = self.new("save")
        self.say(
            "import tempfile\n"
            f"{name} = tf.train.Saver()\n"
            f"{name}_path = {name}.save(sess, tempfile.mkdtemp() + '/model')\n"
            f"sess.run(tf.assign({v.name}, tf.zeros_like({v.name})))\n"
            f"{name}_zero = sess.run({v.name})\n"
            f"{name}.restore(sess, {name}_path)\n"
            f"{name}_back = sess.run({v.name})",
            f"{name}_zero",
            f"{name}_back",
        )

    def nested_loops(self) -> None:
        """A loop in a loop, and a conditional in one."""
        x = self.pick(lambda v: v.dtype == "float32" and v.ranked and v.bound < 20)
        if x is None:
            return
        inner = self.random.choice(
            (
                f"tf.while_loop(lambda j, b: j < i, lambda j, b: (j + 1, 0.5 * b + {self.inner(x)}), (0, a))[1]",
                "tf.cond(tf.equal(i % 2, 0), lambda: a * 0.5, lambda: tf.tanh(a))",
                "tf.cond(i > 1, lambda: a, lambda: a + 1.0)",
            )
        )
        self.define(
            f"tf.while_loop(lambda i, a: i < {self.random.randint(1, 4)}, "
            f"lambda i, a: (i + 1, {inner}), (0, {x.name}))[1]",
            x.dtype,
            x.shape,
            [x],
            False,
            x.bound * 4 + 8,
        )

    def random_numbers(self) -> None:
        """Random numbers, of which only what is the same for all seeds is told."""
        shape = self.shape(0, 2)
        source, test = self.random.choice(
            (
                (f"tf.random_uniform({list(shape)})", "tf.reduce_all(({0} >= 0.0) & ({0} < 1.0))"),
                (f"tf.random_normal({list(shape)}, seed=3)", "tf.reduce_all(tf.is_finite({0}))"),
                (f"tf.truncated_normal({list(shape)})", "tf.reduce_all(tf.abs({0}) <= 2.0)"),
                (
                    f"tf.random_uniform({list(shape)}, 2, 5, tf.int32)",
                    "tf.reduce_all(({0} >= 2) & ({0} < 5))",
                ),
            )
        )
        name = self.new("r")
        self.say(f"{name} = {source}", name)
        self.define(test.format(name), "bool", (), [], True, 1)

    # -- conditionals and loops

    def inner(self, x: Value, letter: str | None = None) -> str:
        """An expression with the dtype and shape of ``x``, without growth."""
        n = letter or x.name
        if x.dtype in INTEGERS:
            return self.random.choice(
                (f"{n} + 1", f"{n} * 2 - 1", f"tf.abs({n})", f"tf.maximum({n}, 1)")
            )
        return self.random.choice(
            (
                f"tf.tanh({n})",
                f"{n} * 0.5",
                f"tf.nn.relu({n}) - 0.5",
                f"tf.sin({n}) + 1.0",
                f"tf.square(tf.sigmoid({n}))",
                f"tf.identity({n})",
            )
        )

    def predicate(self, beside: list[Value]) -> tuple[str, Value] | None:
        """A boolean scalar."""
        x = self.pick(lambda v: v.exact and v.dtype != "string", beside)
        if x is None:
            return None
        if x.dtype == "bool":
            return (x.name if x.shape == () and x.ranked else f"tf.reduce_all({x.name})"), x
        total = x.name if x.shape == () and x.ranked else f"tf.reduce_sum({x.name})"
        return f"{total} > {self.random.choice((0, 1, 2))}", x

    def cond(self) -> None:
        """A conditional."""
        x = self.pick(lambda v: v.dtype in FLOATS + INTEGERS and v.ranked)
        if x is None:
            return
        p = self.predicate([x])
        if p is None:
            return
        one, two = self.inner(x), self.inner(x)
        if self.chance(0.25):
            one = (
                f"tf.cond(tf.reduce_sum({x.name}) * 0 < 1, lambda: {one}, lambda: {self.inner(x)})"
            )
        if self.chance(0.2):
            source = f"tf.case([({p[0]}, lambda: {one})], default=lambda: {two})"
        else:
            source = f"tf.cond({p[0]}, lambda: {one}, lambda: {two})"
        self.define(source, x.dtype, x.shape, [x, p[1]], False, 2 * x.bound + 2)

    def cond_of_two(self) -> None:
        """A conditional with two results."""
        # A result depends on all that both sides read, in harness.tf1 alone.
        x = self.pick(lambda v: v.dtype in FLOATS and v.ranked and not v.writes)
        if x is None:
            return
        p = self.predicate([x])
        if p is None or p[1].writes:
            return
        like = self.pick(
            lambda v: (
                v.dtype in FLOATS + INTEGERS
                and v.ranked
                and (v.reads, v.feeds, v.writes) == (x.reads, x.feeds, x.writes)
            ),
            [x],
        )
        y = x if like is None else like
        name = self.new("t")
        self.say(
            f"{name}, {name}b = tf.cond({p[0]}, lambda: ({self.inner(x)}, {self.inner(y)}), "
            f"lambda: ({self.inner(x)}, {self.inner(y)}))",
            name,
            f"{name}b",
        )
        of = [x, y, p[1]]
        self.values.append(self.known(name, x.dtype, x.shape, of, False, 2 * x.bound + 2))
        self.values.append(self.known(f"{name}b", y.dtype, y.shape, of, False, 2 * y.bound + 2))

    def cond_that_assigns(self) -> None:
        """A conditional whose side changes a variable."""
        if not self.variables:
            return
        v = self.random.choice(self.variables)
        p = self.predicate([])
        if p is None or v.name in p[1].reads or p[1].writes:
            return
        one, two = (
            self.random.choice(
                (
                    f"tf.assign({v.name}, {v.name} * 2)",
                    f"tf.assign_add({v.name}, tf.ones_like({v.name}))",
                    f"tf.identity({v.name})",
                )
            )
            for _ in range(2)
        )
        value = self.known(self.new("t"), v.dtype, v.shape, [v, p[1]], False, 50.0)
        self.say(f"{value.name} = tf.cond({p[0]}, lambda: {one}, lambda: {two})", value.name)
        self.add_writer(value, v)

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
            )
        )

    def loop(self) -> None:
        """A loop with a counter."""
        x = self.pick(lambda v: v.dtype in FLOATS and v.ranked and v.bound < 20 and not v.writes)
        if x is None:
            return
        turns = str(self.random.randint(0, 5))
        of = [x]
        limit = self.pick(
            lambda v: (
                v.dtype == "int32" and v.shape == () and v.ranked and v.bound <= 8 and not v.writes
            ),
            [x],
        )
        if limit is not None and self.chance(0.4):
            turns, of = limit.name, [x, limit]
        body = f"0.5 * a + {self.inner(x, 'a') if self.chance(0.5) else f'tf.tanh({x.name})'}"
        more = self.random.choice(
            ("", "", f", maximum_iterations={self.random.randint(0, 6)}", ", back_prop=False")
        )
        name = self.new("t")
        start = self.random.choice((x.name, f"tf.zeros_like({x.name})"))
        self.say(
            f"{name}, {name}b = tf.while_loop(lambda i, a: i < {turns}, lambda i, a: (i + 1, {body}), "
            f"({0}, {start}){more})",
            name,
            f"{name}b",
        )
        self.values.append(self.known(name, "int32", (), of, True, 8))
        self.values.append(self.known(f"{name}b", x.dtype, x.shape, of, False, 4 * x.bound + 8))

    def rows(self) -> None:
        """A function of each row."""
        x = self.pick(lambda v: v.dtype in FLOATS and v.ranked and bool(v.shape) and v.bound < 20)
        if x is None:
            return
        rest = x.shape[1:]
        row = Value("a", x.dtype, rest)
        start = "tf.zeros(" + f"{list(rest)}, tf.{x.dtype})"
        if not all(isinstance(s, int) for s in rest):
            start = f"tf.zeros_like({x.name}[0])"
        inner = self.inner(row)
        way = self.random.randrange(4)
        if way == 0:
            self.define(
                f"tf.map_fn(lambda a: {inner}, {x.name})", x.dtype, x.shape, [x], False, x.bound + 2
            )
        elif way == 1:
            self.define(
                f"tf.scan(lambda a, b: 0.5 * ({inner}) + b, {x.name}, {start})",
                x.dtype,
                x.shape,
                [x],
                False,
                3 * x.bound + 3,
            )
        elif way == 2:
            self.define(
                f"tf.foldl(lambda a, b: 0.5 * ({inner}) + b, {x.name}, {start})",
                x.dtype,
                rest,
                [x],
                False,
                3 * x.bound + 3,
            )
        elif isinstance(x.shape[0], int):
            name = self.new("a")
            self.say(
                f"{name} = tf.TensorArray(tf.{x.dtype}, {x.shape[0]}, clear_after_read=False).unstack({x.name})"
            )
            self.define(f"{name}.stack()", x.dtype, x.shape, [x], True, x.bound)
            self.define(
                f"{name}.read({self.random.randrange(x.shape[0])})",
                x.dtype,
                rest,
                [x],
                True,
                x.bound,
            )

    def array_loop(self) -> None:
        """A loop that writes a TensorArray."""
        x = self.pick(lambda v: v.dtype in FLOATS and v.static and v.bound < 20 and not v.writes)
        if x is None:
            return
        n = self.random.randint(1, 4)
        self.define(
            f"tf.while_loop(lambda i, a, ta: i < {n}, lambda i, a, ta: (i + 1, {self.inner(x, 'a')}, ta.write(i, a)), "
            f"[0, {x.name}, tf.TensorArray(tf.{x.dtype}, {n})])[2].stack()",
            x.dtype,
            (n, *x.shape),
            [x],
            False,
            8 * x.bound + 8,
            named=False,
        )

    # -- variables, order and training

    def assign(self) -> None:
        """A change of a variable."""
        if not self.variables:
            return
        v = self.random.choice(self.variables)
        x = self.pick(
            lambda u: (
                u.dtype == v.dtype
                and u.shape == v.shape
                and u.ranked
                and v.name not in u.writes
                and u.bound < 16
            )
        )
        value = x.name if x is not None else f"tf.ones_like({v.name})"
        source = self.random.choice(
            (
                f"tf.assign({v.name}, {value})",
                f"tf.assign_add({v.name}, {value})",
                f"tf.assign_sub({v.name}, {value})",
                f"{v.name}.assign({value})",
                f"{v.name}.assign_add({value})",
            )
        )
        if v.shape and self.chance(0.3):
            row = self.numbers(v.dtype, (1, *v.shape[1:]))
            at = self.random.randrange(int(v.shape[0]))
            way = self.random.choice(("update", "add", "sub"))
            source, x = f"tf.scatter_{way}({v.name}, [{at}], {row})", None
        name = self.new("u")
        self.say(f"{name} = {source}", name)
        of = [v] if x is None else [v, x]
        self.add_writer(self.known(name, v.dtype, v.shape, of, False, 50.0), v)

    def after(self) -> None:
        """Draws a read or an update under control dependencies."""
        u = self.pick(lambda v: bool(v.writes), large=True)
        if u is None:
            return
        changed = [v for v in self.variables if v.name in u.writes]
        if not changed:
            return
        v = self.random.choice(changed)
        name = self.new("t")
        source = self.random.choice(
            (f"tf.identity({v.name})", f"{v.name}.read_value()", f"{v.name} + {v.name}")
        )
        if self.chance(0.3):
            source = f"tf.assign_add({v.name}, tf.ones_like({v.name}))"
        self.say(f"with tf.control_dependencies([{u.name}]):\n    {name} = {source}", name)
        self.add_writer(self.known(name, v.dtype, v.shape, [u, v], False, 50.0), *changed)

    def grouped(self) -> None:
        """Several changes in one operation."""
        a = self.pick(lambda v: bool(v.writes), large=True)
        if a is None:
            return
        b = self.pick(lambda v: bool(v.writes) or v.kind == "tensor", [a], large=True)
        name = self.new("g")
        parts = f"{a.name}" if b is None else f"{a.name}, {b.name}"
        self.say(f"{name} = tf.group({parts})", name)
        of = [a] if b is None else [a, b]
        known = self.known(name, "none", (), of, False, 1e9)
        self.values.append(Value(**{**vars(known), "kind": "operation"}))

    def gradients(self) -> None:
        """Derivatives of a tensor by what stands behind."""
        y = self.pick(lambda v: v.dtype == "float32" and not v.writes)
        # TensorFlow has no second derivative of a loop.
        if y is None or {DERIVATIVE, LOOP} <= y.reads:
            return
        sources = [
            v
            for v in self.values
            if v.dtype == "float32" and (v.name in y.reads or v.name in y.feeds)
        ]
        if not sources:
            return
        xs = self.random.sample(sources, min(len(sources), self.random.randint(1, 2)))
        name = self.new("d")
        names = [f"{name}_{i}" for i in range(len(xs))]
        seeds = self.random.choice(("", "", f", grad_ys=[tf.ones_like({y.name}) * 2.0]"))
        listed = ", ".join(x.name for x in xs)
        # A second derivative that is zero everywhere is None in TensorFlow alone.
        nothing = "g" if DERIVATIVE not in y.reads else "tf.zeros_like(x)"
        self.say(
            f"{''.join(f'{n}, ' for n in names)}= [{nothing} if g is None else tf.convert_to_tensor(g) "
            f"for g, x in zip(tf.gradients({y.name}, [{listed}]{seeds}), [{listed}])]",
            *names,
        )
        for n, x in zip(names, xs, strict=True):
            value = self.known(n, x.dtype, x.shape, [y, x], False, 50.0, x.ranked)
            self.values.append(
                Value(**{**vars(value), "kind": "gradient", "reads": value.reads | {DERIVATIVE}})
            )

    def train(self) -> None:
        """An optimizer on a loss."""
        y = self.pick(
            lambda v: v.dtype == "float32" and bool(v.reads) and not v.writes and v.kind == "tensor"
        )
        if y is None:
            return
        optimizer = self.random.choice(OPTIMIZERS)
        step = self.new("step")
        optimizer = optimizer.replace("step", step)
        self.say(f"{step} = tf.Variable(0, trainable=False)", step)
        counter = Value(step, "int32", (), reads=frozenset([step]), kind="fixed")
        self.variables.append(counter)
        loss, name = self.new("loss"), self.new("train")
        self.say(f"{loss} = tf.reduce_mean(tf.square({y.name}))", loss)
        told = self.known(loss, "float32", (), [y], False, 1e4)
        self.values.append(told)
        way = self.random.randrange(3)
        if way == 0:
            body = f"{name} = {optimizer}.minimize({loss}, global_step={step})"
        elif way == 1:
            body = (
                f"pairs{name} = {optimizer}.compute_gradients({loss})\n    "
                f"{name} = opt.apply_gradients([(tf.clip_by_value(g, -1.0, 1.0), v) for g, v in pairs{name} "
                f"if g is not None], global_step={step})"
            )
            body = body.replace(optimizer, "opt")
            body = f"opt = {optimizer}\n    {body}"
        else:
            body = f"{name} = {optimizer}.minimize({loss})"
        # TensorFlow never applies an update after a loop that the derivative goes through again.
        before = "" if LOOP in told.reads else loss
        self.say(f"with tf.control_dependencies([{before}]):\n    {body}", name)
        changed = frozenset(v.name for v in self.variables if v.kind == "variable") | {step}
        self.values.append(
            Value(
                name,
                "none",
                (),
                False,
                1e9,
                told.feeds,
                told.reads | {step},
                changed,
                True,
                "operation",
            )
        )
        self.together.add(frozenset((name, loss)))

    def average(self) -> None:
        """A moving average of a variable."""
        floats = [v for v in self.variables if v.dtype in FLOATS and v.kind == "variable"]
        # A second initialisation would read the variable and set it, in any order.
        if not floats or self.stepped:
            return
        v = self.random.choice(floats)
        name = self.new("ema")
        self.say(
            f"{name} = tf.train.ExponentialMovingAverage(0.5)\n{name}_apply = {name}.apply([{v.name}])\n"
            f"with tf.control_dependencies([{name}_apply]):\n    {name}_now = tf.identity({name}.average({v.name}))",
            f"{name}_now",
        )
        known = self.known(f"{name}_now", v.dtype, v.shape, [v], False, v.bound)
        self.values.append(
            Value(**{**vars(known), "writes": frozenset([name]), "reads": known.reads | {name}})
        )

    # -- other kinds of values

    def queue(self) -> None:
        """A queue, what goes in and what comes out."""
        dtype, shape = self.random.choice(("float32", "int32")), self.shape(0, 1)
        name = self.new("q")
        capacity = self.random.randint(3, 8)
        self.say(f"{name} = tf.FIFOQueue({capacity}, [tf.{dtype}], [{list(shape)}])")
        many = self.random.randint(1, 2)
        rows = self.numbers(dtype, (many, *shape))
        self.say(f"{name}_in = {name}.enqueue_many([{rows}])", f"{name}_in")
        self.say(f"{name}_out = {name}.dequeue()", f"{name}_out")
        self.say(f"{name}_outs = {name}.dequeue_many({many})", f"{name}_outs")
        self.say(f"{name}_upto = {name}.dequeue_up_to({many + 1})", f"{name}_upto")
        self.say(f"{name}_size = {name}.size()", f"{name}_size")
        self.say(f"{name}_close = {name}.close()", f"{name}_close")
        self.queues.append(Queue(name, dtype, shape, capacity))
        self.queues[-1].size.append(many)

    def queue_steps(self, queue: Queue) -> None:
        """Steps that fill and empty a queue, up to its end; none waits."""
        many, n = queue.size[1], queue.name
        held = 0
        for _ in range(self.random.randint(2, 6)):
            options = ["size"]
            if held + many <= queue.capacity:
                options += ["in"] * 2
            if held >= 1:
                options.append("out")
            if held >= many:
                options.append("outs")
            step = self.random.choice(options)
            held += {"in": many, "out": -1, "outs": -many, "size": 0}[step]
            self.run(f"{n}_{step}", "")
        if self.chance(0.5):
            self.run(f"{n}_close", "")
            for _ in range(2):
                self.run(f"{n}_{self.random.choice(('out', 'outs', 'upto', 'in', 'size'))}", "")

    def sparse(self) -> None:
        """A sparse matrix."""
        rows, columns = self.random.randint(2, 4), self.random.randint(2, 4)
        places = sorted(
            {(self.random.randrange(rows), self.random.randrange(columns)) for _ in range(3)}
        )
        name = self.new("sp")
        self.say(
            f"{name} = tf.SparseTensor({[list(p) for p in places]}, "
            f"{self.numbers('float32', [len(places)])}, [{rows}, {columns}])"
        )
        self.define(f"tf.sparse_tensor_to_dense({name})", "float32", (rows, columns), [], True, 2)
        if self.chance(0.5):
            self.define(f"{name}.values", "float32", (len(places),), [], True, 2)
        if self.chance(0.5):
            self.define(f"{name}.dense_shape", "int64", (2,), [], True, 4)

    def strings(self) -> None:
        """Strings that are joined, parsed, written or sliced."""
        way = self.random.randrange(5)
        n = self.random.randint(1, 3)
        if way == 0:
            words = [self.random.choice(WORDS) for _ in range(n)]
            self.define(f"tf.string_join([tf.constant({words}), 'z'], '-')", "string", (n,), [])
        elif way == 1:
            numbers = [str(self.random.randint(-8, 8) / 4) for _ in range(n)]
            self.define(
                f"tf.string_to_number(tf.constant({numbers}))", "float32", (n,), [], True, 2
            )
        elif way == 2:
            x = self.pick(lambda v: v.dtype in INTEGERS and v.ranked)
            if x is not None:
                self.define(f"tf.as_string({x.name})", "string", x.shape, [x])
        elif way == 3:
            words = [self.random.choice(WORDS) for _ in range(n)]
            self.define(f"tf.constant({words})[{self.random.randrange(n)}]", "string", (), [])
        else:
            name = self.new("p")
            self.say(f"{name} = tf.placeholder(tf.string, [None])", name)
            value = Value(name, "string", ("n0",), feeds=frozenset([name]))
            self.placeholders[name] = value
            self.values.append(value)

    # -- mistakes

    def mistake(self) -> None:
        """A statement that TensorFlow refuses when the graph is built."""
        a = self.pick(lambda v: v.dtype == "float32" and v.static)
        b = self.pick(lambda v: v.dtype == "int32")
        sources: list[str] = [
            "tf.zeros([2, 3]) + tf.zeros([2, 4])",
            "tf.matmul(tf.zeros([2, 3]), tf.zeros([2, 3]))",
            "tf.matmul(tf.zeros([3]), tf.zeros([3, 2]))",
            "tf.concat([tf.zeros([2, 3]), tf.zeros([3, 2])], 0)",
            "tf.stack([tf.zeros([2]), tf.zeros([3])])",
            "tf.squeeze(tf.zeros([2, 1]), [0])",
            "tf.expand_dims(tf.zeros([2]), 5)",
            "tf.transpose(tf.zeros([2, 3]), [0])",
            "tf.split(tf.zeros([5]), 2)",
            "tf.cond(tf.constant(True), lambda: tf.zeros([]), lambda: tf.zeros([], tf.int32))",
            "tf.cond(tf.constant(True), lambda: tf.zeros([]), lambda: (tf.zeros([]), tf.zeros([])))",
            "tf.while_loop(lambda i: i < 3, lambda i: tf.zeros([2]), [tf.zeros([])])",
            "tf.convert_to_tensor([[1.0], [1.0, 2.0]])",
            "tf.constant(1.5, tf.int32)",
            "tf.placeholder('no dtype')",
            'tf.get_variable("no_shape")',
            "tf.one_hot([0.5], 2)",
            "tf.reduce_sum(tf.zeros([2]), 3)",
            "tf.unstack(tf.placeholder(tf.float32, [None]))",
            "tf.gradients([], [])",
            "tf.assign(tf.constant(1.0), 2.0)",
            "tf.train.GradientDescentOptimizer(0.1).minimize(tf.constant(1.0))",
            "tf.zeros([2, 2])[0, 0, 0]",
        ]
        if a is not None:
            sources += [
                f"tf.reshape({a.name}, [{product(a.shape) + 1}])",
                f"tf.reduce_sum({a.name}, {len(a.shape)})",
                f"tf.assign({a.name}, {a.name} * 2)"
                if a.kind == "tensor"
                else f"{a.name}.assign(tf.zeros([9]))",
            ]
        if a is not None and b is not None:
            sources += [
                f"tf.add({a.name}, {b.name})",
                f"tf.matmul({a.name}, {b.name})",
                f"tf.concat([{a.name}, {b.name}], 0)",
                f"tf.where({b.name}, {a.name}, {a.name})",
            ]
        if self.variables:
            v = self.random.choice(self.variables)
            sources += [
                f"tf.assign({v.name}, tf.zeros([7, 7], tf.{v.dtype}))",
                f'tf.assign({v.name}, "text")',
                f'tf.get_variable("again_{v.name}", [2]), tf.get_variable("again_{v.name}", [2])',
                f'tf.get_variable("other_{v.name}", [2], initializer=np.zeros(2, np.float32))',
            ]
        name = self.new("e")
        self.say(f"{name} = {self.random.choice(sources)}", name)

    def wrong_step(self) -> None:
        """A step that TensorFlow refuses, or that fails."""
        sources = [
            "sess.run(None)",
            "sess.run('nothing:0')",
            "sess.run('nothing')",
            "sess.run(tf.placeholder(tf.float32, []))",
            "sess.run(3)",
            "sess.run([])",
            "sess.run(tf.Assert(tf.constant(False), ['no']))",
            "sess.run(tf.assert_equal(tf.constant([1, 2]), tf.placeholder_with_default(np.array([1, 3], np.int32), [2])))",
            "sess.run(tf.check_numerics(tf.placeholder_with_default(np.float32(np.nan), []), 'not finite'))",
            "sess.run(tf.Variable(1.0))",
            "sess.run(tf.py_func(lambda: 1 // 0, [], tf.int64))",
            "sess.run(tf.string_to_number(tf.constant(['x'])))",
        ]
        for value in self.placeholders.values():
            n = value.name
            if value.feeds:
                sources += [
                    f"sess.run(tf.identity({n}))",
                    f"sess.run(tf.identity({n}), {{{n}: None}})",
                ]
            sources.append(
                f"sess.run(tf.identity({n}), {{{n}: {self.numbers('float32', (2, 2, 2, 2, 2))}}})"
            )
            if value.dtype in FLOATS + INTEGERS:
                sources.append(f"sess.run(tf.identity({n}), {{{n}: 'text'}})")
        static = self.pick(lambda v: v.dtype == "float32" and v.shape == ("n1",))
        if static is not None and static.name in self.placeholders:
            n = static.name
            sources += [
                f"sess.run({n} + tf.zeros([7]), {{{n}: np.ones(3, np.float32)}})",
                f"sess.run(tf.reshape({n}, [2, 2]), {{{n}: np.ones(3, np.float32)}})",
            ]
        name = self.new("r")
        self.say(f"{name} = {self.random.choice(sources)}", name)

    # -- steps

    def feed(self, needs: Iterable[str]) -> str:
        """Returns the feeds of the placeholders, as source."""
        sizes: dict[str, int] = {}
        items = []
        for name in sorted(needs):
            value = self.placeholders[name]
            shape = [
                sizes.setdefault(s, self.random.randint(1, 4)) if isinstance(s, str) else s
                for s in value.shape
            ]
            numbers = self.numbers(value.dtype, shape)
            key = (
                f'"{name}:0"'
                if value.ranked and self.chance(0.05) and value.dtype != "string"
                else name
            )
            items.append(f"{key}: {numbers}")
        return "{" + ", ".join(items) + "}"

    def run(self, fetches: str, feeds: str) -> None:
        """A step whose result is compared."""
        name = self.new("r")
        self.say(f"{name} = sess.run({fetches}{', ' + feeds if feeds else ''})", name)

    def step(self) -> None:
        """A step of some of the tensors."""
        chosen: list[Value] = []
        for _ in range(self.random.randint(1, 5)):
            v = self.pick(lambda v: v not in chosen and v.kind != "gradient", chosen, large=True)
            g = self.pick(lambda v: v.kind == "gradient" and v not in chosen, chosen, large=True)
            for found in (v, g):
                if found is not None and all(self.calm(found, c) for c in chosen):
                    chosen.append(found)
        if not chosen:
            return
        needs = frozenset().union(*(v.feeds for v in chosen))
        optional = [n for n, v in self.placeholders.items() if not v.feeds and self.chance(0.2)]
        feeds = self.feed(needs | set(optional)) if needs or optional else ""
        if self.chance(0.15):
            inner = self.pick(
                lambda v: (
                    v.kind == "tensor"
                    and v.static
                    and v.name[0] == "t"
                    and not v.writes
                    and v.dtype in FLOATS + INTEGERS
                )
            )
            if inner is not None:
                sizes = [s for s in inner.shape if isinstance(s, int)]
                extra = f"{inner.name}: {self.numbers(inner.dtype, sizes)}"
                feeds = f"{{{extra}}}" if not feeds else f"{feeds[:-1]}, {extra}}}"
        names = [
            f"*([{v.name}] if {v.name} is not None else [])" if v.kind == "gradient" else v.name
            for v in chosen
        ]
        plain = not any(v.kind == "gradient" for v in chosen)
        fetches = "[" + ", ".join(names) + "]"
        if plain and self.chance(0.2):
            fetches = "{" + ", ".join(f'"{n}": {n}' for n in names) + "}"
        elif plain and self.chance(0.2):
            fetches = f"({names[0]}, [" + ", ".join(names[1:]) + "])"
        elif plain and len(names) == 1:
            fetches = names[0]
        for _ in range(self.random.choice((1, 1, 2, 3))):
            self.run(fetches, feeds)

    def steps(self) -> None:
        """The steps at the end of a part of a program."""
        self.stepped = True
        self.say("sess.run(tf.global_variables_initializer())")
        for _ in range(self.random.randint(1, 4)):
            self.step()
        for queue in self.queues:
            self.queue_steps(queue)
        self.queues.clear()
        if self.chance(0.15):
            self.wrong_step()
        if self.variables:
            self.run("[" + ", ".join(v.name for v in self.variables) + "]", "")

    def draw(self) -> list[Statement]:
        """The statements of the program."""
        weights = list(WEIGHTS.items())
        for _ in range(self.random.choice((1, 1, 2))):
            self.placeholder()
            self.variable()
            for _ in range(self.random.randint(4, 16)):
                (method,) = self.random.choices([m for m, _ in weights], [w for _, w in weights])
                self.looping = method in LOOPS
                method(self)
            self.steps()
        return self.statements


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


WEIGHTS: dict[Callable[[Drawer], None], float] = {
    Drawer.placeholder: 4,
    Drawer.placeholder_with_default: 1,
    Drawer.constant: 4,
    Drawer.variable: 4,
    Drawer.reuse: 1,
    Drawer.unary: 12,
    Drawer.binary: 10,
    Drawer.literal_binary: 4,
    Drawer.jump: 1,
    Drawer.compare: 3,
    Drawer.cast: 3,
    Drawer.choose: 2,
    Drawer.reduce: 6,
    Drawer.arg: 2,
    Drawer.along: 4,
    Drawer.matrix: 5,
    Drawer.layout: 9,
    Drawer.take: 6,
    Drawer.sizes_of: 3,
    Drawer.classes: 1,
    Drawer.images: 2,
    Drawer.scopes: 1,
    Drawer.saved: 0.5,
    Drawer.nested_loops: 2,
    Drawer.several: 2,
    Drawer.placed: 4,
    Drawer.counted: 2,
    Drawer.looked_up: 3,
    Drawer.asked: 1,
    Drawer.loss: 3,
    Drawer.random_numbers: 1,
    Drawer.cond: 4,
    Drawer.cond_of_two: 2,
    Drawer.cond_that_assigns: 2,
    Drawer.loop: 4,
    Drawer.rows: 4,
    Drawer.array_loop: 1,
    Drawer.assign: 5,
    Drawer.after: 4,
    Drawer.grouped: 2,
    Drawer.gradients: 5,
    Drawer.train: 3,
    Drawer.average: 1,
    Drawer.queue: 2,
    Drawer.sparse: 1,
    Drawer.strings: 2,
    Drawer.mistake: 2,
}
"""The kinds of statements, with their weights."""


LOOPS = (Drawer.loop, Drawer.rows, Drawer.array_loop, Drawer.nested_loops)


def draw(seed: int) -> list[Statement]:
    """The program of a seed, the same at every call."""
    return Drawer(seed).draw()
