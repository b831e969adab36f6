"""Draws changes of variables: assignments, gradients and optimizers."""

from __future__ import annotations

from tests.harness.tf1.oracle.drawer import FLOATS, LOOP, NORM, PRODUCT, ROWS, Drawer, Value

DERIVATIVE = "a derivative"
"""Stands in ``Value.reads`` for a derivative behind the tensor."""
OTHER_SLOTS = "tf.train.AdamOptimizer(0.125)", "tf.train.RMSPropOptimizer(0.125)"
"""Optimizers that do not have as many variables as TensorFlow's: a count beside Adam's moments, no momentum of 0."""
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


def draw_assign(drawer: Drawer) -> None:
    """Draws a change of a variable."""
    if not drawer.variables:
        return
    v = drawer.random.choice(drawer.variables)
    x = drawer.pick(
        lambda u: (
            u.dtype == v.dtype
            and u.shape == v.shape
            and u.ranked
            and v.name not in u.writes
            and u.bound < 16
        )
    )
    value = x.name if x is not None else f"tf.ones_like({v.name})"
    source = drawer.random.choice(
        (
            f"tf.assign({v.name}, {value})",
            f"tf.assign_add({v.name}, {value})",
            f"tf.assign_sub({v.name}, {value})",
            f"{v.name}.assign({value})",
            f"{v.name}.assign_add({value})",
        )
    )
    if v.shape and drawer.chance(0.3):
        row = drawer.numbers(v.dtype, (1, *v.shape[1:]))
        at = drawer.random.randrange(int(v.shape[0]))
        way = drawer.random.choice(("update", "add", "sub"))
        source, x = f"tf.scatter_{way}({v.name}, [{at}], {row})", None
    name = drawer.new("u")
    drawer.say(f"{name} = {source}", name)
    of = [v] if x is None else [v, x]
    drawer.add_writer(drawer.known(name, v.dtype, v.shape, of, False, 50.0), v)


def draw_after(drawer: Drawer) -> None:
    """Draws a read or an update under control dependencies."""
    u = drawer.pick(lambda v: bool(v.writes), large=True)
    if u is None:
        return
    changed = [v for v in drawer.variables if v.name in u.writes]
    if not changed:
        return
    v = drawer.random.choice(changed)
    name = drawer.new("t")
    source = drawer.random.choice(
        (f"tf.identity({v.name})", f"{v.name}.read_value()", f"{v.name} + {v.name}")
    )
    if drawer.chance(0.3):
        source = f"tf.assign_add({v.name}, tf.ones_like({v.name}))"
    drawer.say(f"with tf.control_dependencies([{u.name}]):\n    {name} = {source}", name)
    drawer.add_writer(drawer.known(name, v.dtype, v.shape, [u, v], False, 50.0), *changed)


def draw_grouped(drawer: Drawer) -> None:
    """Draws several changes in one operation."""
    a = drawer.pick(lambda v: bool(v.writes), large=True)
    if a is None:
        return
    b = drawer.pick(lambda v: bool(v.writes) or v.kind == "tensor", [a], large=True)
    name = drawer.new("g")
    parts = f"{a.name}" if b is None else f"{a.name}, {b.name}"
    drawer.say(f"{name} = tf.group({parts})", name)
    of = [a] if b is None else [a, b]
    known = drawer.known(name, "none", (), of, False, 1e9)
    drawer.values.append(Value(**{**vars(known), "kind": "operation"}))


def draw_gradients(drawer: Drawer) -> None:
    """Draws derivatives of a tensor by what stands behind."""
    y = drawer.pick(lambda v: v.dtype == "float32" and not v.writes)
    # TensorFlow has no second derivative of a loop.
    if y is None or {DERIVATIVE, LOOP} <= y.reads or PRODUCT in y.marks:
        return
    sources = [
        v
        for v in drawer.values
        if v.dtype == "float32" and (v.name in y.reads or v.name in y.feeds)
    ]
    if not sources:
        return
    xs = drawer.random.sample(sources, min(len(sources), drawer.random.randint(1, 2)))
    name = drawer.new("d")
    names = [f"{name}_{i}" for i in range(len(xs))]
    seeds = drawer.random.choice(("", "", f", grad_ys=[tf.ones_like({y.name}) * 2.0]"))
    listed = ", ".join(x.name for x in xs)
    # A second derivative that is zero everywhere is None in TensorFlow alone.
    nothing = "g" if DERIVATIVE not in y.reads else "tf.zeros_like(x)"
    drawer.say(
        f"{''.join(f'{n}, ' for n in names)}= [{nothing} if g is None else tf.convert_to_tensor(g) "
        f"for g, x in zip(tf.gradients({y.name}, [{listed}]{seeds}), [{listed}])]",
        *names,
    )
    for n, x in zip(names, xs, strict=True):
        value = drawer.known(n, x.dtype, x.shape, [y, x], False, 50.0, x.ranked)
        drawer.values.append(
            Value(**{**vars(value), "kind": "gradient", "reads": value.reads | {DERIVATIVE}})
        )


def draw_train(drawer: Drawer) -> None:
    """Draws an optimizer on a loss."""
    y = drawer.pick(
        lambda v: v.dtype == "float32" and bool(v.reads) and not v.writes and v.kind == "tensor"
    )
    if y is None or PRODUCT in y.marks:
        return
    of, among = f"tf.square({y.name})", ""
    # A derivative that is zero everywhere is None in TensorFlow alone, so the loss needs another.
    if DERIVATIVE in y.reads:
        trained = [v for v in drawer.variables if v.kind == "variable" and v.name in y.reads]
        trained = [v for v in trained if v.dtype == "float32"]
        if not trained:
            return
        of, among = f"{of} + tf.reduce_sum(tf.square({trained[0].name}))", f"[{trained[0].name}]"
    optimizer = drawer.random.choice(OPTIMIZERS)
    # Adam makes a whole step of a derivative that is rounding alone.
    if NORM in y.marks and "Adam" in optimizer:
        optimizer = OPTIMIZERS[0]
    drawer.has_other_slots |= optimizer in OTHER_SLOTS
    step = drawer.new("step")
    optimizer = optimizer.replace("step", step)
    drawer.say(f"{step} = tf.Variable(0, trainable=False)", step)
    counter = Value(step, "int32", (), reads=frozenset([step]), kind="fixed")
    drawer.variables.append(counter)
    loss, name = drawer.new("loss"), drawer.new("train")
    drawer.say(f"{loss} = tf.reduce_mean({of})", loss)
    told = drawer.known(loss, "float32", (), [y], False, 1e4)
    drawer.values.append(told)
    way = drawer.random.randrange(3)
    way = 0 if ROWS in y.marks and way == 1 else way
    more = f", var_list={among}" if among else ""
    if way == 0:
        body = f"{name} = {optimizer}.minimize({loss}, global_step={step}{more})"
    elif way == 1:
        body = (
            f"pairs{name} = {optimizer}.compute_gradients({loss}{more})\n    "
            f"{name} = opt.apply_gradients([(tf.clip_by_value(g, -1.0, 1.0), v) for g, v in pairs{name} "
            f"if g is not None], global_step={step})"
        )
        body = body.replace(optimizer, "opt")
        body = f"opt = {optimizer}\n    {body}"
    else:
        body = f"{name} = {optimizer}.minimize({loss}{more})"
    # TensorFlow never applies an update after a loop that the derivative goes through again.
    before = "" if LOOP in told.reads else loss
    drawer.say(f"with tf.control_dependencies([{before}]):\n    {body}", name)
    changed = frozenset(v.name for v in drawer.variables if v.kind == "variable") | {step}
    drawer.values.append(
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
    drawer.together.add(frozenset((name, loss)))


def draw_average(drawer: Drawer) -> None:
    """Draws a moving average of a variable."""
    floats = [v for v in drawer.variables if v.dtype in FLOATS and v.kind == "variable"]
    # A second initialisation would read the variable and set it, in any order.
    if not floats or drawer.stepped:
        return
    v = drawer.random.choice(floats)
    drawer.has_averages = True
    name = drawer.new("ema")
    drawer.say(
        f"{name} = tf.train.ExponentialMovingAverage(0.5)\n{name}_apply = {name}.apply([{v.name}])\n"
        f"with tf.control_dependencies([{name}_apply]):\n    {name}_now = tf.identity({name}.average({v.name}))",
        f"{name}_now",
    )
    known = drawer.known(f"{name}_now", v.dtype, v.shape, [v], False, v.bound)
    drawer.values.append(
        Value(**{**vars(known), "writes": frozenset([name]), "reads": known.reads | {name}})
    )
