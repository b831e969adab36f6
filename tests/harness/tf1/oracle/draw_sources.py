"""Draws tensors without operands: placeholders, constants, variables and random numbers."""

from __future__ import annotations

from tests.harness.tf1.oracle.drawer import Drawer, Shape, Value


def draw_placeholder(drawer: Drawer) -> None:
    """Draws a placeholder, most often with a size that is not known."""
    dtype = drawer.random.choice(
        (drawer.dtype(), drawer.dtype(), drawer.dtype(), "bool", "float32")
    )
    known = drawer.shape(0, 2)
    shape: Shape = known
    ranked = True
    if drawer.chance(0.7):
        if drawer.chance(0.5) and drawer.sizes:
            size = f"n{drawer.random.randint(1, drawer.sizes)}"
        else:
            drawer.sizes += 1
            size = f"n{drawer.sizes}"
        shape = (size, *known)
        ranked = drawer.chance(0.9)
    name = drawer.new("p")
    static = [None if isinstance(s, str) else s for s in shape] if ranked else None
    value = Value(name, dtype, shape, feeds=frozenset([name]), ranked=ranked)
    given = f"tf.{dtype}" + ("" if static is None else f", {static}")
    drawer.say(f'{name} = tf.placeholder({given}, name="{name}")', name)
    drawer.placeholders[name] = value
    drawer.values.append(value)


def draw_placeholder_with_default(drawer: Drawer) -> None:
    """Draws a placeholder that need not be fed."""
    dtype, known = drawer.dtype(), drawer.shape(0, 2)
    name = drawer.new("p")
    drawer.say(
        f"{name} = tf.placeholder_with_default({drawer.numbers(dtype, known)}, {list(known)})",
        name,
    )
    drawer.placeholders[name] = Value(name, dtype, known)
    drawer.values.append(Value(name, dtype, known))


def draw_constant(drawer: Drawer) -> None:
    """Draws a constant, or a tensor of its shape alone."""
    dtype, shape = drawer.dtype(), drawer.shape()
    literal = [
        f"tf.constant({drawer.numbers(dtype, shape)})",
        f"tf.zeros({list(shape)}, tf.{dtype})",
        f"tf.ones({list(shape)}, tf.{dtype})",
        f"tf.fill({list(shape)}, tf.constant(2, tf.{dtype}))",
        f"tf.convert_to_tensor({drawer.numbers(dtype, shape)})",
    ]
    drawer.define(drawer.random.choice(literal), dtype, shape, [], True, 4)


def draw_variable(drawer: Drawer) -> None:
    """Draws a variable, by one of the two ways."""
    dtype = drawer.random.choice(("float32",) * 6 + ("float64", "int32", "int64"))
    shape = drawer.shape(0, 2)
    name = drawer.new("v")
    numbers = drawer.numbers(dtype, shape)
    train = drawer.random.choice(("", "", "", ", trainable=False"))
    way = drawer.random.randrange(4)
    if way == 0:
        source = f"tf.Variable({numbers}{train})"
    elif way == 1:
        source = f'tf.Variable({numbers}{train}, name="w")'
    elif way == 2:
        source = f'tf.get_variable("{name}", {list(shape)}, tf.{dtype}, tf.constant_initializer(2){train})'
    else:
        source = f'tf.get_variable("{name}", initializer={numbers}{train})'
    text = f"{name} = {source}"
    if drawer.chance(0.3):
        scope = drawer.random.choice(("net", "net/a", "b"))
        text = f'with tf.variable_scope("{scope}"):\n    {text}'
    drawer.say(text, name)
    drawer.say(f"n{name} = {name}.name", f"n{name}")
    value = Value(
        name, dtype, shape, reads=frozenset([name]), kind="fixed" if train else "variable"
    )
    drawer.variables.append(value)
    drawer.values.append(value)


def draw_reuse(drawer: Drawer) -> None:
    """Draws a variable that is got a second time, by reuse."""
    name = drawer.new("v")
    scope = drawer.new("s")
    reuse = drawer.random.choice(("reuse=True", "reuse=tf.AUTO_REUSE"))
    drawer.say(
        f'with tf.variable_scope("{scope}"):\n'
        f'    {name} = tf.get_variable("w", [2], initializer=tf.ones_initializer())\n'
        f'with tf.variable_scope("{scope}", {reuse}):\n'
        f'    {name}b = tf.get_variable("w", [2])\n'
        f"same{name} = {name} is {name}b",
        name,
        f"same{name}",
    )
    value = Value(name, "float32", (2,), reads=frozenset([name]), kind="variable")
    drawer.variables.append(value)
    drawer.values.append(value)


def draw_random_numbers(drawer: Drawer) -> None:
    """Draws random numbers, of which only what is the same for all seeds is told."""
    shape = drawer.shape(0, 2)
    source, test = drawer.random.choice(
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
    name = drawer.new("r")
    drawer.say(f"{name} = {source}", name)
    drawer.define(test.format(name), "bool", (), [], True, 1)
