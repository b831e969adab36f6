"""Draws arithmetic: functions of one tensor and of two, comparisons, casts and choices."""

from __future__ import annotations

from collections.abc import Callable

from tests.harness.tf1.oracle.drawer import FLOATS, INTEGERS, LARGE, Drawer, broadcast

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


def draw_unary(drawer: Drawer) -> None:
    """Draws a function of one tensor."""
    x = drawer.pick(lambda v: v.dtype in FLOATS, large=True)
    if x is None:
        return
    source, bound = drawer.random.choice(UNARY if x.bound <= LARGE else LIMITED)
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
    drawer.define(
        source.replace("{}", x.name), x.dtype, x.shape, [x], exact, bound(x.bound), ranked
    )


def draw_binary(drawer: Drawer) -> None:
    """Draws a function of two tensors of one dtype, whose shapes fit."""
    x = drawer.pick(lambda v: v.dtype in FLOATS + INTEGERS and v.bound < 40)
    if x is None:
        return
    y = drawer.pick(
        lambda v: v.dtype == x.dtype and v.bound < 40 and broadcast(x.shape, v.shape) is not None,
        [x],
    )
    if y is None:
        return
    if x.dtype in INTEGERS:
        source, bound = drawer.random.choice(INTEGER_BINARY)
        exact = True
    else:
        source, bound, exact = drawer.random.choice(BINARY)
    shape = broadcast(x.shape, y.shape)
    assert shape is not None
    drawer.define(
        source.format(x.name, y.name),
        x.dtype,
        shape,
        [x, y],
        exact,
        float(bound(x.bound, y.bound)),
        x.ranked and y.ranked,
    )


def draw_literal_binary(drawer: Drawer) -> None:
    """Draws a tensor beside a Python number."""
    x = drawer.pick(lambda v: v.dtype in FLOATS + INTEGERS and v.bound < 40)
    if x is None:
        return
    if x.dtype in INTEGERS:
        source = drawer.random.choice(
            ("{} + 2", "3 - {}", "{} * 2", "{} // 2", "{} % 3", "-{}", "abs({})")
        )
    else:
        source = drawer.random.choice(
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
    drawer.define(source.format(x.name), x.dtype, x.shape, [x], True, 3 * x.bound + 3, x.ranked)


def draw_jump(drawer: Drawer) -> None:
    """Draws a function that jumps."""
    x = drawer.pick(lambda v: v.dtype in FLOATS and v.exact)
    if x is not None:
        source = f"{drawer.random.choice(JUMPS)}({x.name})"
        drawer.define(source, x.dtype, x.shape, [x], True, x.bound + 1, x.ranked)


def draw_compare(drawer: Drawer) -> None:
    """Draws a comparison, or logic of two of them."""
    x = drawer.pick(lambda v: v.exact and v.dtype != "string")
    if x is None:
        return
    y = drawer.pick(
        lambda v: v.exact and v.dtype == x.dtype and broadcast(x.shape, v.shape) is not None,
        [x],
    )
    if y is None:
        return
    shape = broadcast(x.shape, y.shape)
    assert shape is not None
    if x.dtype == "bool":
        source = drawer.random.choice(
            (
                "tf.logical_and({}, {})",
                "tf.logical_or({}, {})",
                "tf.logical_xor({}, {})",
                "{} & {}",
                "{} | {}",
            )
        )
    else:
        source = drawer.random.choice(COMPARE)
    drawer.define(
        source.format(x.name, y.name), "bool", shape, [x, y], True, 1, x.ranked and y.ranked
    )


def draw_cast(drawer: Drawer) -> None:
    """Draws another dtype."""
    x = drawer.pick(lambda v: v.exact and v.dtype != "string")
    if x is None:
        return
    dtype = drawer.random.choice(("float32", "float32", "float64", "int32", "int64", "bool"))
    # A variable that is trained has the digits of a float32.
    if x.dtype == "float32" and dtype == "float64" and x.reads:
        return
    drawer.define(f"tf.cast({x.name}, tf.{dtype})", dtype, x.shape, [x], True, x.bound, x.ranked)


def draw_choose(drawer: Drawer) -> None:
    """Draws ``tf.where`` of a condition and two tensors."""
    p = drawer.pick(lambda v: v.dtype == "bool" and v.ranked)
    if p is None:
        return
    x = drawer.pick(lambda v: v.shape == p.shape and v.dtype in FLOATS + INTEGERS, [p])
    if x is None:
        return
    y = drawer.pick(lambda v: v.shape == p.shape and v.dtype == x.dtype, [p, x])
    if y is not None:
        drawer.define(
            f"tf.where({p.name}, {x.name}, {y.name})",
            x.dtype,
            x.shape,
            [p, x, y],
            True,
            max(x.bound, y.bound),
            x.ranked and y.ranked,
        )
