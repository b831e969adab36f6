"""Draws queues, sparse tensors, strings, names and savers."""

from __future__ import annotations

from tests.harness.tf1.oracle.drawer import INTEGERS, WORDS, Drawer, Queue, Value


def draw_queue(drawer: Drawer) -> None:
    """Draws a queue, what goes in and what comes out."""
    dtype, shape = drawer.random.choice(("float32", "int32")), drawer.shape(0, 1)
    name = drawer.new("q")
    capacity = drawer.random.randint(3, 8)
    drawer.say(f"{name} = tf.FIFOQueue({capacity}, [tf.{dtype}], [{list(shape)}])")
    many = drawer.random.randint(1, 2)
    rows = drawer.numbers(dtype, (many, *shape))
    drawer.say(f"{name}_in = {name}.enqueue_many([{rows}])", f"{name}_in")
    drawer.say(f"{name}_out = {name}.dequeue()", f"{name}_out")
    drawer.say(f"{name}_outs = {name}.dequeue_many({many})", f"{name}_outs")
    drawer.say(f"{name}_upto = {name}.dequeue_up_to({many + 1})", f"{name}_upto")
    drawer.say(f"{name}_size = {name}.size()", f"{name}_size")
    drawer.say(f"{name}_close = {name}.close()", f"{name}_close")
    drawer.queues.append(Queue(name, dtype, shape, capacity))
    drawer.queues[-1].size.append(many)


def draw_sparse(drawer: Drawer) -> None:
    """Draws a sparse matrix."""
    rows, columns = drawer.random.randint(2, 4), drawer.random.randint(2, 4)
    places = sorted(
        {(drawer.random.randrange(rows), drawer.random.randrange(columns)) for _ in range(3)}
    )
    name = drawer.new("sp")
    drawer.say(
        f"{name} = tf.SparseTensor({[list(p) for p in places]}, "
        f"{drawer.numbers('float32', [len(places)])}, [{rows}, {columns}])"
    )
    drawer.define(f"tf.sparse_tensor_to_dense({name})", "float32", (rows, columns), [], True, 2)
    if drawer.chance(0.5):
        drawer.define(f"{name}.values", "float32", (len(places),), [], True, 2)
    if drawer.chance(0.5):
        sizes = drawer.define(f"{name}.dense_shape", "int64", (2,), [], True, 4)
        # TensorFlow has used the sizes to build the graph.
        drawer.unfed.add(sizes.name)


def draw_strings(drawer: Drawer) -> None:
    """Draws strings that are joined, parsed, written or sliced."""
    way = drawer.random.randrange(5)
    n = drawer.random.randint(1, 3)
    if way == 0:
        words = [drawer.random.choice(WORDS) for _ in range(n)]
        drawer.define(f"tf.string_join([tf.constant({words}), 'z'], '-')", "string", (n,), [])
    elif way == 1:
        numbers = [str(drawer.random.randint(-8, 8) / 4) for _ in range(n)]
        drawer.define(f"tf.string_to_number(tf.constant({numbers}))", "float32", (n,), [], True, 2)
    elif way == 2:
        x = drawer.pick(lambda v: v.dtype in INTEGERS and v.ranked)
        if x is not None:
            drawer.define(f"tf.as_string({x.name})", "string", x.shape, [x])
    elif way == 3:
        words = [drawer.random.choice(WORDS) for _ in range(n)]
        drawer.define(f"tf.constant({words})[{drawer.random.randrange(n)}]", "string", (), [])
    else:
        name = drawer.new("p")
        drawer.say(f"{name} = tf.placeholder(tf.string, [None])", name)
        value = Value(name, "string", ("n0",), feeds=frozenset([name]))
        drawer.placeholders[name] = value
        drawer.values.append(value)


def draw_scopes(drawer: Drawer) -> None:
    """Draws variables in nested scopes, by names that repeat."""
    name = drawer.new("v")
    outer = drawer.random.choice(("net", "net/a", "b"))
    inner = drawer.random.choice(('"in"', 'None, default_name="in"', '"in", reuse=tf.AUTO_REUSE'))
    make = drawer.random.choice(
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
    if drawer.chance(0.5):
        text += (
            f"with tf.variable_scope(scope):\n    n{name}b = [tf.zeros([], name='z').name, scope.name, "
            "scope.original_name_scope]"
        )
        drawer.say(text, name, f"n{name}", f"n{name}b")
    else:
        drawer.say(text, name, f"n{name}")


def draw_asked(drawer: Drawer) -> None:
    """Draws questions about variables."""
    if not drawer.variables:
        return
    v = drawer.random.choice(drawer.variables)
    name = drawer.new("ask")
    source = drawer.random.choice(
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
    listed = "GLOBAL" in source or "global" in source or "report" in source
    if not (listed and drawer.has_other_slots):
        drawer.say(f"{name} = {source}", name)


def draw_saved(drawer: Drawer) -> None:
    """Draws variables that are saved, changed and restored."""
    if not drawer.variables or not drawer.stepped:
        return
    v = drawer.random.choice(drawer.variables)
    name = drawer.new("save")
    drawer.say(
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
