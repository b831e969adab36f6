"""Draws the steps of a program: runs of the session with their feeds."""

from __future__ import annotations

from collections.abc import Iterable

from tests.harness.tf1.oracle.draw_mistakes import draw_wrong_step
from tests.harness.tf1.oracle.draw_updates import DERIVATIVE
from tests.harness.tf1.oracle.drawer import FLOATS, INTEGERS, Drawer, Queue, Value


def draw_all_steps(drawer: Drawer) -> None:
    """Draws the steps at the end of a part of a program."""
    begun = drawer.stepped and drawer.has_averages
    drawer.stepped = True
    # An average that begins anew would read its variable while that begins anew.
    drawer.say(
        "for v in tf.global_variables():\n"
        "    if not sess.run(tf.is_variable_initialized(v)):\n"
        "        sess.run(v.initializer)"
        if begun
        else "sess.run(tf.global_variables_initializer())"
    )
    for _ in range(drawer.random.randint(1, 4)):
        draw_step(drawer)
    for queue in drawer.queues:
        step_queue(drawer, queue)
    drawer.queues.clear()
    if drawer.chance(0.15):
        draw_wrong_step(drawer)
    if drawer.variables:
        say_run(drawer, "[" + ", ".join(v.name for v in drawer.variables) + "]", "")


def draw_step(drawer: Drawer) -> None:
    """Draws a step of some of the tensors."""
    chosen: list[Value] = []
    for _ in range(drawer.random.randint(1, 5)):
        v = drawer.pick(lambda v: v not in chosen and v.kind != "gradient", chosen, large=True)
        g = drawer.pick(lambda v: v.kind == "gradient" and v not in chosen, chosen, large=True)
        for found in (v, g):
            if found is not None and all(drawer.calm(found, c) for c in chosen):
                chosen.append(found)
    if not chosen:
        return
    needs = frozenset().union(*(v.feeds for v in chosen))
    optional = [n for n, v in drawer.placeholders.items() if not v.feeds and drawer.chance(0.2)]
    feeds = feeds_of(drawer, needs | set(optional)) if needs or optional else ""
    if drawer.chance(0.15):
        inner = drawer.pick(
            lambda v: (
                v.kind == "tensor"
                and v.static
                and v.name[0] == "t"
                and not v.writes
                and v.dtype in FLOATS + INTEGERS
            )
        )
        if inner is not None and may_be_fed(drawer, inner, chosen):
            sizes = [s for s in inner.shape if isinstance(s, int)]
            extra = f"{inner.name}: {drawer.numbers(inner.dtype, sizes)}"
            feeds = f"{{{extra}}}" if not feeds else f"{feeds[:-1]}, {extra}}}"
    names = [
        f"*([{v.name}] if {v.name} is not None else [])" if v.kind == "gradient" else v.name
        for v in chosen
    ]
    plain = not any(v.kind == "gradient" for v in chosen)
    fetches = "[" + ", ".join(names) + "]"
    if plain and drawer.chance(0.2):
        fetches = "{" + ", ".join(f'"{n}": {n}' for n in names) + "}"
    elif plain and drawer.chance(0.2):
        fetches = f"({names[0]}, [" + ", ".join(names[1:]) + "])"
    elif plain and len(names) == 1:
        fetches = names[0]
    for _ in range(drawer.random.choice((1, 1, 2, 3))):
        say_run(drawer, fetches, feeds)


def may_be_fed(drawer: Drawer, inner: Value, chosen: list[Value]) -> bool:
    """Returns True if a value for ``inner`` means the same in both engines."""
    derived = any(v.kind in ("gradient", "operation") or DERIVATIVE in v.reads for v in chosen)
    return inner.name not in drawer.unfed and not (
        derived and inner.name in drawer.derived_by_result
    )


def step_queue(drawer: Drawer, queue: Queue) -> None:
    """Draws steps that fill and empty a queue, up to its end; none waits."""
    many, n = queue.size[1], queue.name
    held = 0
    for _ in range(drawer.random.randint(2, 6)):
        options = ["size"]
        if held + many <= queue.capacity:
            options += ["in"] * 2
        if held >= 1:
            options.append("out")
        if held >= many:
            options.append("outs")
        step = drawer.random.choice(options)
        held += {"in": many, "out": -1, "outs": -many, "size": 0}[step]
        say_run(drawer, f"{n}_{step}", "")
    if drawer.chance(0.5):
        say_run(drawer, f"{n}_close", "")
        for _ in range(2):
            say_run(
                drawer, f"{n}_{drawer.random.choice(('out', 'outs', 'upto', 'in', 'size'))}", ""
            )


def feeds_of(drawer: Drawer, needs: Iterable[str]) -> str:
    """Returns the feeds of the placeholders, as source."""
    sizes: dict[str, int] = {}
    items = []
    for name in sorted(needs):
        value = drawer.placeholders[name]
        shape = [
            sizes.setdefault(s, drawer.random.randint(1, 4)) if isinstance(s, str) else s
            for s in value.shape
        ]
        numbers = drawer.numbers(value.dtype, shape)
        key = (
            f'"{name}:0"'
            if value.ranked and drawer.chance(0.05) and value.dtype != "string"
            else name
        )
        items.append(f"{key}: {numbers}")
    return "{" + ", ".join(items) + "}"


def say_run(drawer: Drawer, fetches: str, feeds: str) -> None:
    """Draws a step whose result is compared."""
    name = drawer.new("r")
    drawer.say(f"{name} = sess.run({fetches}{', ' + feeds if feeds else ''})", name)
