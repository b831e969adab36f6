"""Draws mistakes: programs and steps that both engines must refuse."""

from __future__ import annotations

from tests.harness.tf1.oracle.drawer import FLOATS, INTEGERS, Drawer, product


def draw_mistake(drawer: Drawer) -> None:
    """Draws a statement that TensorFlow refuses when the graph is built."""
    a = drawer.pick(lambda v: v.dtype == "float32" and v.static)
    b = drawer.pick(lambda v: v.dtype == "int32")
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
            # The result of an assignment may be assigned to in TensorFlow.
            f"tf.assign({f'tf.identity({a.name})' if a.writes else a.name}, {a.name} * 2)"
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
    if drawer.variables:
        v = drawer.random.choice(drawer.variables)
        sources += [
            f"tf.assign({v.name}, tf.zeros([7, 7], tf.{v.dtype}))",
            f'tf.assign({v.name}, "text")',
            f'tf.get_variable("again_{v.name}", [2]), tf.get_variable("again_{v.name}", [2])',
            f'tf.get_variable("other_{v.name}", [2], initializer=np.zeros(2, np.float32))',
        ]
    name = drawer.new("e")
    drawer.say(f"{name} = {drawer.random.choice(sources)}", name)


def draw_wrong_step(drawer: Drawer) -> None:
    """Draws a step that TensorFlow refuses, or that fails."""
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
    for value in drawer.placeholders.values():
        n = value.name
        if value.feeds:
            sources += [
                f"sess.run(tf.identity({n}))",
                f"sess.run(tf.identity({n}), {{{n}: None}})",
            ]
        sources.append(
            f"sess.run(tf.identity({n}), {{{n}: {drawer.numbers('float32', (2, 2, 2, 2, 2))}}})"
        )
        if value.dtype in FLOATS + INTEGERS:
            sources.append(f"sess.run(tf.identity({n}), {{{n}: 'text'}})")
    static = drawer.pick(lambda v: v.dtype == "float32" and v.shape == ("n1",))
    if static is not None and static.name in drawer.placeholders:
        n = static.name
        sources += [
            f"sess.run({n} + tf.zeros([7]), {{{n}: np.ones(3, np.float32)}})",
            f"sess.run(tf.reshape({n}, [2, 2]), {{{n}: np.ones(3, np.float32)}})",
        ]
    name = drawer.new("r")
    drawer.say(f"{name} = {drawer.random.choice(sources)}", name)
