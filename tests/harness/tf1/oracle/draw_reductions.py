"""Draws operations that reduce: sums, matrix products, losses and operations of images."""

from __future__ import annotations

from dataclasses import replace

from tests.harness.tf1.oracle.drawer import FLOATS, INTEGERS, NORM, Drawer, Shape, product

REDUCE = ("sum", "mean", "max", "min", "logsumexp", "prod")


def draw_reduce(drawer: Drawer) -> None:
    """Draws a sum, mean or the like over some axes or all."""
    x = drawer.pick(lambda v: v.dtype != "string" and v.bound < 32)
    if x is None:
        return
    keep = drawer.random.choice(("", ", keepdims=True", ", keep_dims=True"))
    axes = [] if not x.ranked else [i for i in range(len(x.shape)) if drawer.chance(0.5)]
    shape: Shape = tuple(
        1 if i in axes else s for i, s in enumerate(x.shape) if i not in axes or keep
    )
    if axes:
        told = [i - len(x.shape) if drawer.chance(0.3) else i for i in axes]
        axis = f", {told[0] if len(told) == 1 and drawer.chance(0.5) else told}"
    else:
        axis, shape = "", (1,) * len(x.shape) if keep else ()
    ranked = x.ranked or not keep
    if x.dtype == "bool":
        what = drawer.random.choice(("all", "any"))
        bound = 1.0
    else:
        what = drawer.random.choice(REDUCE if x.dtype in FLOATS else REDUCE[:4])
        bound = {
            "sum": x.bound * 64,
            "prod": min(x.bound, 2) ** 8,
            "logsumexp": x.bound + 4,
        }.get(what, x.bound)
        if what == "prod" and x.bound > 2:
            return
    exact = what in ("sum", "max", "min", "all", "any") or x.dtype in INTEGERS
    drawer.define(
        f"tf.reduce_{what}({x.name}{axis}{keep})", x.dtype, shape, [x], exact, bound, ranked
    )


def draw_arg(drawer: Drawer) -> None:
    """Draws the place of the largest or smallest."""
    x = drawer.pick(
        lambda v: v.dtype in FLOATS + INTEGERS and v.exact and v.ranked and bool(v.shape)
    )
    if x is None:
        return
    axis = drawer.random.randrange(len(x.shape))
    what = drawer.random.choice(("argmax", "argmin"))
    out = drawer.random.choice(("int64", "int32"))
    more = "" if out == "int64" else ", output_type=tf.int32"
    shape = x.shape[:axis] + x.shape[axis + 1 :]
    drawer.define(f"tf.{what}({x.name}, {axis}{more})", out, shape, [x], True, 8)


def draw_along(drawer: Drawer) -> None:
    """Draws a function along an axis that keeps the shape."""
    x = drawer.pick(lambda v: v.dtype == "float32" and v.ranked and bool(v.shape) and v.bound < 8)
    if x is None:
        return
    axis = drawer.random.randrange(len(x.shape))
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
    source, bound, exact = drawer.random.choice(sources)
    drawer.define(source, x.dtype, x.shape, [x], exact, bound)


def draw_matrix(drawer: Drawer) -> None:
    """Draws a product of matrices."""
    x = drawer.pick(lambda v: v.dtype in FLOATS and len(v.shape) == 2 and v.ranked and v.bound < 8)
    if x is None:
        return
    y = drawer.pick(
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
    a, b = drawer.chance(0.3), drawer.chance(0.3)
    left, right = x.shape[::-1] if a else x.shape, y.shape[::-1] if b else y.shape
    if left[1] != right[0]:
        return
    flags = (", transpose_a=True" if a else "") + (", transpose_b=True" if b else "")
    source = f"tf.matmul({x.name}, {y.name}{flags})"
    if not flags and drawer.chance(0.2):
        source = drawer.random.choice(
            (
                f"tf.tensordot({x.name}, {y.name}, 1)",
                f"tf.einsum('ij,jk->ik', {x.name}, {y.name})",
            )
        )
    drawer.define(source, x.dtype, (left[0], right[1]), [x, y], True, x.bound * y.bound * 5)


def draw_classes(drawer: Drawer) -> None:
    """Draws integers as classes: one row for each."""
    x = drawer.pick(lambda v: v.dtype in INTEGERS and v.exact and v.ranked and len(v.shape) < 3)
    if x is not None:
        way = drawer.random.choice(
            (f"tf.one_hot({x.name}, 3)", f"tf.one_hot({x.name}, 3, 2.0, -1.0)")
        )
        drawer.define(way, "float32", (*x.shape, 3), [x], True, 2)


def draw_loss(drawer: Drawer) -> None:
    """Draws a loss with classes."""
    x = drawer.pick(
        lambda v: v.dtype == "float32" and len(v.shape) == 2 and v.ranked and v.bound < 20
    )
    if x is None or not isinstance(x.shape[1], int):
        return
    rows, width = x.shape
    y = drawer.pick(lambda v: v.dtype == "float32" and v.shape == x.shape and v.ranked, [x])
    n = x.name
    if y is not None and drawer.chance(0.6):
        source, shape = drawer.random.choice(
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
        drawer.define(source, "float32", shape, [x, y], False, 200)
    else:
        labels = f"tf.zeros([tf.shape({n})[0]], tf.int32)"
        drawer.define(
            f"tf.nn.sparse_softmax_cross_entropy_with_logits(labels={labels}, logits={n})",
            "float32",
            (rows,),
            [x],
            False,
            50,
        )


def draw_images(drawer: Drawer) -> None:
    """Draws a convolution, or a window of a pool, of pictures."""
    x = drawer.pick(
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
    padding = drawer.random.choice(("SAME", "VALID"))
    window, stride = drawer.random.randint(1, 2), drawer.random.randint(1, 2)
    if padding == "VALID" and window > min(height, width):
        return
    if padding == "SAME":
        sizes = -(-height // stride), -(-width // stride)
    else:
        sizes = (height - window) // stride + 1, (width - window) // stride + 1
    kernel = drawer.numbers("float32", (window, window, 1, 2))
    strides = [1, stride, stride, 1]
    source, depth, exact = drawer.random.choice(
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
    drawer.define(source, "float32", (rows, *sizes, depth), [x], exact, x.bound * 8)


def draw_several(drawer: Drawer) -> None:
    """Draws a function with two results."""
    x = drawer.pick(lambda v: v.dtype == "float32" and v.ranked and bool(v.shape) and v.bound < 8)
    if x is None:
        return
    name, n = drawer.new("t"), x.name
    last = x.shape[-1]
    rest: Shape = x.shape[1:]
    way = drawer.random.randrange(4)
    if way == 0:
        drawer.say(f"{name}, {name}b = tf.nn.moments({n}, [0])", name, f"{name}b")
        shapes = rest, rest
    elif way == 1 and isinstance(last, int) and x.exact and last == 1:
        drawer.say(f"{name}, {name}b = tf.nn.top_k({n}, 1)", name, f"{name}b")
        drawer.values.append(drawer.known(name, x.dtype, x.shape, [x], True, x.bound))
        return
    elif way == 2:
        drawer.say(f"{name}, {name}b = tf.tuple([{n}, {n} * 2.0])", name, f"{name}b")
        shapes = x.shape, x.shape
    elif way == 3:
        drawer.say(
            f"({name}, {name}b), norm{name} = tf.clip_by_global_norm([{n}, {n} + 1.0], 2.0)",
            name,
            f"{name}b",
            f"norm{name}",
        )
        shapes = x.shape, x.shape
    else:
        return
    for each, shape in zip((name, f"{name}b"), shapes, strict=True):
        value = drawer.known(each, x.dtype, shape, [x], False, 4 * x.bound)
        drawer.values.append(replace(value, marks=value.marks | ({NORM} if way == 3 else set())))
