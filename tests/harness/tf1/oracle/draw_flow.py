"""Draws conditionals and loops."""

from __future__ import annotations

from tests.harness.tf1.oracle.drawer import FLOATS, INTEGERS, Drawer, Value


def inner_expression(drawer: Drawer, x: Value, letter: str | None = None) -> str:
    """Returns an expression with the dtype and shape of ``x``, without growth."""
    n = letter or x.name
    if x.dtype in INTEGERS:
        return drawer.random.choice(
            (f"{n} + 1", f"{n} * 2 - 1", f"tf.abs({n})", f"tf.maximum({n}, 1)")
        )
    return drawer.random.choice(
        (
            f"tf.tanh({n})",
            f"{n} * 0.5",
            f"tf.nn.relu({n}) - 0.5",
            f"tf.sin({n}) + 1.0",
            f"tf.square(tf.sigmoid({n}))",
            f"tf.identity({n})",
        )
    )


def drawn_predicate(drawer: Drawer, beside: list[Value]) -> tuple[str, Value] | None:
    """Returns the source of a boolean scalar, and the tensor behind it."""
    x = drawer.pick(lambda v: v.exact and v.dtype != "string", beside)
    if x is None:
        return None
    if x.dtype == "bool":
        return (x.name if x.shape == () and x.ranked else f"tf.reduce_all({x.name})"), x
    total = x.name if x.shape == () and x.ranked else f"tf.reduce_sum({x.name})"
    return f"{total} > {drawer.random.choice((0, 1, 2))}", x


def draw_cond(drawer: Drawer) -> None:
    """Draws a conditional."""
    x = drawer.pick(lambda v: v.dtype in FLOATS + INTEGERS and v.ranked)
    if x is None:
        return
    p = drawn_predicate(drawer, [x])
    if p is None:
        return
    one, two = inner_expression(drawer, x), inner_expression(drawer, x)
    if drawer.chance(0.25):
        one = f"tf.cond(tf.reduce_sum({x.name}) * 0 < 1, lambda: {one}, lambda: {inner_expression(drawer, x)})"
    if drawer.chance(0.2):
        source = f"tf.case([({p[0]}, lambda: {one})], default=lambda: {two})"
    else:
        source = f"tf.cond({p[0]}, lambda: {one}, lambda: {two})"
    drawer.define(source, x.dtype, x.shape, [x, p[1]], False, 2 * x.bound + 2)


def draw_cond_of_two(drawer: Drawer) -> None:
    """Draws a conditional with two results."""
    # A result depends on all that both sides read, in harness.tf1 alone.
    x = drawer.pick(lambda v: v.dtype in FLOATS and v.ranked and not v.writes)
    if x is None:
        return
    p = drawn_predicate(drawer, [x])
    if p is None or p[1].writes:
        return
    like = drawer.pick(
        lambda v: (
            v.dtype in FLOATS + INTEGERS
            and v.ranked
            and (v.reads, v.feeds, v.writes) == (x.reads, x.feeds, x.writes)
            and v.marks == x.marks
        ),
        [x],
    )
    y = x if like is None else like
    name = drawer.new("t")
    drawer.say(
        f"{name}, {name}b = tf.cond({p[0]}, lambda: ({inner_expression(drawer, x)}, {inner_expression(drawer, y)}), "
        f"lambda: ({inner_expression(drawer, x)}, {inner_expression(drawer, y)}))",
        name,
        f"{name}b",
    )
    of = [x, y, p[1]]
    drawer.values.append(drawer.known(name, x.dtype, x.shape, of, False, 2 * x.bound + 2))
    drawer.values.append(drawer.known(f"{name}b", y.dtype, y.shape, of, False, 2 * y.bound + 2))


def draw_cond_that_assigns(drawer: Drawer) -> None:
    """Draws a conditional whose side changes a variable."""
    if not drawer.variables:
        return
    v = drawer.random.choice(drawer.variables)
    p = drawn_predicate(drawer, [])
    if p is None or v.name in p[1].reads or p[1].writes:
        return
    one, two = (
        drawer.random.choice(
            (
                f"tf.assign({v.name}, {v.name} * 2)",
                f"tf.assign_add({v.name}, tf.ones_like({v.name}))",
                f"tf.identity({v.name})",
            )
        )
        for _ in range(2)
    )
    value = drawer.known(drawer.new("t"), v.dtype, v.shape, [v, p[1]], False, 50.0)
    drawer.say(f"{value.name} = tf.cond({p[0]}, lambda: {one}, lambda: {two})", value.name)
    drawer.add_writer(value, v)


def draw_loop(drawer: Drawer) -> None:
    """Draws a loop with a counter."""
    x = drawer.pick(lambda v: v.dtype in FLOATS and v.ranked and v.bound < 20 and not v.writes)
    if x is None:
        return
    turns = str(drawer.random.randint(0, 5))
    of = [x]
    limit = drawer.pick(
        lambda v: (
            v.dtype == "int32" and v.shape == () and v.ranked and v.bound <= 8 and not v.writes
        ),
        [x],
    )
    if limit is not None and drawer.chance(0.4):
        turns, of = limit.name, [x, limit]
    body = f"0.5 * a + {inner_expression(drawer, x, 'a') if drawer.chance(0.5) else f'tf.tanh({x.name})'}"
    more = drawer.random.choice(
        ("", "", f", maximum_iterations={drawer.random.randint(0, 6)}", ", back_prop=False")
    )
    name = drawer.new("t")
    start = drawer.random.choice((x.name, f"tf.zeros_like({x.name})"))
    drawer.say(
        f"{name}, {name}b = tf.while_loop(lambda i, a: i < {turns}, lambda i, a: (i + 1, {body}), "
        f"({0}, {start}){more})",
        name,
        f"{name}b",
    )
    drawer.values.append(drawer.known(name, "int32", (), of, True, 8))
    drawer.values.append(drawer.known(f"{name}b", x.dtype, x.shape, of, False, 4 * x.bound + 8))


def draw_rows(drawer: Drawer) -> None:
    """Draws a function of each row."""
    x = drawer.pick(lambda v: v.dtype in FLOATS and v.ranked and bool(v.shape) and v.bound < 20)
    if x is None:
        return
    rest = x.shape[1:]
    row = Value("a", x.dtype, rest)
    start = "tf.zeros(" + f"{list(rest)}, tf.{x.dtype})"
    if not all(isinstance(s, int) for s in rest):
        start = f"tf.zeros_like({x.name}[0])"
    inner = inner_expression(drawer, row)
    way = drawer.random.randrange(4)
    if way == 0:
        drawer.define(
            f"tf.map_fn(lambda a: {inner}, {x.name})", x.dtype, x.shape, [x], False, x.bound + 2
        )
    elif way == 1:
        drawer.define(
            f"tf.scan(lambda a, b: 0.5 * ({inner}) + b, {x.name}, {start})",
            x.dtype,
            x.shape,
            [x],
            False,
            3 * x.bound + 3,
        )
    elif way == 2:
        drawer.define(
            f"tf.foldl(lambda a, b: 0.5 * ({inner}) + b, {x.name}, {start})",
            x.dtype,
            rest,
            [x],
            False,
            3 * x.bound + 3,
        )
    elif isinstance(x.shape[0], int):
        name = drawer.new("a")
        drawer.say(
            f"{name} = tf.TensorArray(tf.{x.dtype}, {x.shape[0]}, clear_after_read=False).unstack({x.name})"
        )
        drawer.define(f"{name}.stack()", x.dtype, x.shape, [x], True, x.bound)
        drawer.define(
            f"{name}.read({drawer.random.randrange(x.shape[0])})",
            x.dtype,
            rest,
            [x],
            True,
            x.bound,
        )


def draw_array_loop(drawer: Drawer) -> None:
    """Draws a loop that writes a TensorArray."""
    x = drawer.pick(lambda v: v.dtype in FLOATS and v.static and v.bound < 20 and not v.writes)
    if x is None:
        return
    n = drawer.random.randint(1, 4)
    drawer.define(
        f"tf.while_loop(lambda i, a, ta: i < {n}, "
        f"lambda i, a, ta: (i + 1, {inner_expression(drawer, x, 'a')}, ta.write(i, a)), "
        f"[0, {x.name}, tf.TensorArray(tf.{x.dtype}, {n})])[2].stack()",
        x.dtype,
        (n, *x.shape),
        [x],
        False,
        8 * x.bound + 8,
        named=False,
    )


def draw_nested_loops(drawer: Drawer) -> None:
    """Draws a loop in a loop, and a conditional in one."""
    x = drawer.pick(lambda v: v.dtype == "float32" and v.ranked and v.bound < 20)
    if x is None:
        return
    inner = drawer.random.choice(
        (
            f"tf.while_loop(lambda j, b: j < i, lambda j, b: (j + 1, 0.5 * b + {inner_expression(drawer, x)}), (0, a))[1]",
            "tf.cond(tf.equal(i % 2, 0), lambda: a * 0.5, lambda: tf.tanh(a))",
            "tf.cond(i > 1, lambda: a, lambda: a + 1.0)",
        )
    )
    drawer.define(
        f"tf.while_loop(lambda i, a: i < {drawer.random.randint(1, 4)}, "
        f"lambda i, a: (i + 1, {inner}), (0, {x.name}))[1]",
        x.dtype,
        x.shape,
        [x],
        False,
        x.bound * 4 + 8,
    )
