"""Draws operations that move numbers: layouts, slices, sizes and places."""

from __future__ import annotations

from tests.harness.tf1.oracle.drawer import FLOATS, INTEGERS, Drawer, Shape, Value, product


def draw_layout(drawer: Drawer) -> None:
    """Draws another shape of the same numbers."""
    x = drawer.pick(lambda v: v.dtype != "string" and v.ranked)
    if x is None:
        return
    rank = len(x.shape)
    n = x.name
    way = drawer.random.randrange(9)
    if way == 0 and rank >= 2:
        perm = drawer.random.sample(range(rank), rank)
        define_same(drawer, f"tf.transpose({n}, {perm})", x, tuple(x.shape[i] for i in perm))
    elif way == 1 and rank >= 2:
        define_same(drawer, f"tf.transpose({n})", x, x.shape[::-1])
    elif way == 2:
        axis = drawer.random.randint(-rank - 1, rank)
        at = axis if axis >= 0 else axis + rank + 1
        define_same(drawer, f"tf.expand_dims({n}, {axis})", x, (*x.shape[:at], 1, *x.shape[at:]))
    elif way == 3 and 1 in x.shape and x.static:
        define_same(drawer, f"tf.squeeze({n})", x, tuple(s for s in x.shape if s != 1))
    elif way == 4 and rank >= 2 and all(isinstance(s, int) for s in x.shape[1:]):
        rest = product(x.shape[1:])
        source = drawer.random.choice(
            (
                f"tf.reshape({n}, [-1, {rest}])",
                f"tf.reshape({n}, [tf.shape({n})[0], {rest}])",
                f"tf.reshape({n}, tf.stack([tf.shape({n})[0], -1]))",
            )
        )
        define_same(drawer, source, x, (x.shape[0], rest))
    elif way == 5 and x.static:
        define_same(drawer, f"tf.reshape({n}, [-1])", x, (product(x.shape),))
    elif way == 6:
        y = drawer.pick(lambda v: v.dtype == x.dtype and v.shape == x.shape and v.ranked, [x])
        if y is None or y.kind == "gradient":
            return
        axis = drawer.random.randint(0, rank)
        drawer.define(
            f"tf.stack([{n}, {y.name}], {axis})",
            x.dtype,
            (*x.shape[:axis], 2, *x.shape[axis:]),
            [x, y],
            True,
            max(x.bound, y.bound),
        )
    elif way == 7 and rank:
        axis = drawer.random.randrange(rank)
        y = drawer.pick(
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
        # TensorFlow refuses a None beside a tensor by another error than any other None.
        if y is None or y.kind == "gradient" or not isinstance(size, int):
            return
        other = y.shape[axis]
        assert isinstance(other, int)
        shape = (*x.shape[:axis], size + other, *x.shape[axis + 1 :])
        drawer.define(
            f"tf.concat([{n}, {y.name}], {axis})",
            x.dtype,
            shape,
            [x, y],
            True,
            max(x.bound, y.bound),
        )
    elif way == 8 and rank and x.dtype != "bool":
        axis = drawer.random.randrange(rank)
        before = drawer.random.randint(0, 2)
        pads = [[0, 0]] * rank
        pads[axis] = [before, 1]
        size = x.shape[axis]
        if isinstance(size, int):
            shape = (*x.shape[:axis], size + before + 1, *x.shape[axis + 1 :])
            define_same(drawer, f"tf.pad({n}, {pads})", x, shape)


def define_same(drawer: Drawer, source: str, x: Value, shape: Shape) -> None:
    """Draws a tensor with the numbers of another."""
    drawer.define(source, x.dtype, shape, [x], True, x.bound)


def draw_take(drawer: Drawer) -> None:
    """Draws a part of a tensor."""
    x = drawer.pick(lambda v: v.dtype != "string" and v.ranked and bool(v.shape))
    if x is None:
        return
    n, first = x.name, x.shape[0]
    if not isinstance(first, int):
        if len(x.shape) > 1 and isinstance(x.shape[1], int):
            at = drawer.random.randrange(-x.shape[1], x.shape[1])
            define_same(drawer, f"{n}[:, {at}]", x, (first, *x.shape[2:]))
        return
    at = drawer.random.randrange(first)
    size = drawer.random.randint(1, first - at)
    rest = x.shape[1:]
    way = drawer.random.randrange(9)
    if way == 0:
        define_same(drawer, f"{n}[{drawer.random.choice((at, at - first))}]", x, rest)
    elif way == 1:
        define_same(drawer, f"{n}[{at}:{at + size}]", x, (size, *rest))
    elif way == 2:
        define_same(drawer, f"{n}[::-1]", x, x.shape)
    elif way == 3:
        define_same(drawer, f"{n}[::2]", x, ((first + 1) // 2, *rest))
    elif way == 4:
        define_same(drawer, f"{n}[tf.newaxis, ..., tf.newaxis]", x, (1, *x.shape, 1))
    elif way == 5:
        many = [drawer.random.randrange(first) for _ in range(drawer.random.randint(1, 4))]
        source = drawer.random.choice(
            (f"tf.gather({n}, {many})", f"tf.gather({n}, tf.constant({many}, tf.int64))")
        )
        if x.dtype in FLOATS and drawer.chance(0.5):
            source = f"tf.nn.embedding_lookup({n}, {many})"
        define_same(drawer, source, x, (len(many), *rest))
    elif way == 6:
        begin, sizes = [at] + [0] * len(rest), [size] + [-1] * len(rest)
        define_same(drawer, f"tf.slice({n}, {begin}, {sizes})", x, (size, *rest))
    elif way == 7 and first > 1:
        cut = drawer.random.randint(1, first - 1)
        name = drawer.new("t")
        drawer.say(f"{name}, {name}b = tf.split({n}, [{cut}, {first - cut}])", name, f"{name}b")
        drawer.values.append(drawer.known(name, x.dtype, (cut, *rest), [x], True, x.bound))
        drawer.values.append(
            drawer.known(f"{name}b", x.dtype, (first - cut, *rest), [x], True, x.bound)
        )
    elif way == 8:
        times = drawer.random.randint(1, 3)
        multiples = [times] + [1] * len(rest)
        define_same(drawer, f"tf.tile({n}, {multiples})", x, (first * times, *rest))


def draw_sizes_of(drawer: Drawer) -> None:
    """Draws an operation on the shape of a tensor."""
    # A static shape is a constant in TensorFlow alone: what changes a variable is not run for it.
    x = drawer.pick(lambda v: v.dtype != "string" and not v.writes)
    if x is None:
        return
    n, rank = x.name, len(x.shape)
    way = drawer.random.randrange(6)
    if way == 0:
        if x.ranked:
            drawer.define(f"tf.shape({n})", "int32", (rank,), [x], True, 100)
    elif way == 1:
        drawer.define(f"tf.size({n})", "int32", (), [x], True, 200)
    elif way == 2:
        drawer.define(f"tf.rank({n})", "int32", (), [x], True, 4)
    elif way == 3:
        drawer.define(f"tf.zeros_like({n})", x.dtype, x.shape, [x], True, 1, x.ranked)
    elif way == 4 and x.dtype != "bool":
        drawer.define(f"tf.ones_like({n})", x.dtype, x.shape, [x], True, 1, x.ranked)
    elif way == 5 and x.ranked and rank:
        drawer.define(
            f"tf.fill([tf.shape({n})[0], 2], 1.5)", "float32", (x.shape[0], 2), [x], True, 2
        )


def draw_placed(drawer: Drawer) -> None:
    """Draws an operation that moves numbers to other places."""
    x = drawer.pick(
        lambda v: v.dtype in FLOATS + INTEGERS and v.ranked and v.static and bool(v.shape)
    )
    if x is None:
        return
    n, rank = x.name, len(x.shape)
    first, last = int(x.shape[0]), int(x.shape[-1])
    rest = x.shape[1:]
    many = [drawer.random.randrange(3) for _ in range(first)]
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
    source, shape = drawer.random.choice([o for o in options if "roll" not in o[0]])
    drawer.define(source, x.dtype, shape, [x], True, x.bound * 4)


def draw_counted(drawer: Drawer) -> None:
    """Draws an operation on lengths and places."""
    n = drawer.random.randint(1, 5)
    lengths = [drawer.random.randint(0, 4) for _ in range(n)]
    source, dtype, shape = drawer.random.choice(
        (
            (f"tf.range({n})", "int32", (n,)),
            (f"tf.range(1.0, {n + 1}.0)", "float32", (n,)),
            (f"tf.linspace(0.0, 1.0, {n})", "float32", (n,)),
            (f"tf.sequence_mask({lengths}, 4)", "bool", (n, 4)),
            (f"tf.invert_permutation({drawer.random.sample(range(n), n)})", "int32", (n,)),
            (f"tf.count_nonzero({lengths})", "int64", ()),
            (f"tf.eye({n})", "float32", (n, n)),
            (f"tf.cumsum({lengths})", "int32", (n,)),
            (f"tf.one_hot({lengths}, 4, axis=0)", "float32", (4, n)),
        )
    )
    drawer.define(source, dtype, shape, [], "linspace" not in source, 24)


def draw_looked_up(drawer: Drawer) -> None:
    """Draws rows of a variable by computed places, and the derivative by the variable."""
    tables = [v for v in drawer.variables if v.dtype == "float32" and len(v.shape) >= 1]
    if not tables:
        return
    v = drawer.random.choice(tables)
    ids = drawer.pick(lambda u: u.dtype in INTEGERS and u.ranked and u.exact and len(u.shape) < 3)
    if ids is None:
        return
    places = f"tf.abs({ids.name}) % {v.shape[0]}"
    source = drawer.random.choice(
        (f"tf.gather({v.name}, {places})", f"tf.nn.embedding_lookup({v.name}, {places})")
    )
    drawer.define(source, v.dtype, (*ids.shape, *v.shape[1:]), [v, ids], True, v.bound)
