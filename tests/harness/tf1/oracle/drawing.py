"""Draws small programs of TensorFlow 1, each from its seed: what ``running`` gives to two engines.

A program is a list of statements of Python. They may use ``tf``, ``np``, the open session ``sess``
and the names of statements before. A program is drawn so that TensorFlow's result does not depend
on chance or on the last digits: two operations of a step never race for a variable, what jumps
(a floor, a comparison) is computed of numbers without rounding, and nothing grows without limit.
What docs/tf1_differences.md tells of is not drawn.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.harness.tf1.oracle import (
    draw_arithmetic,
    draw_flow,
    draw_layouts,
    draw_mistakes,
    draw_reductions,
    draw_resources,
    draw_sources,
    draw_steps,
    draw_updates,
)
from tests.harness.tf1.oracle.drawer import Drawer, Statement

WEIGHTS: dict[Callable[[Drawer], None], float] = {
    draw_sources.draw_placeholder: 4,
    draw_sources.draw_placeholder_with_default: 1,
    draw_sources.draw_constant: 4,
    draw_sources.draw_variable: 4,
    draw_sources.draw_reuse: 1,
    draw_arithmetic.draw_unary: 12,
    draw_arithmetic.draw_binary: 10,
    draw_arithmetic.draw_literal_binary: 4,
    draw_arithmetic.draw_jump: 1,
    draw_arithmetic.draw_compare: 3,
    draw_arithmetic.draw_cast: 3,
    draw_arithmetic.draw_choose: 2,
    draw_reductions.draw_reduce: 6,
    draw_reductions.draw_arg: 2,
    draw_reductions.draw_along: 4,
    draw_reductions.draw_matrix: 5,
    draw_layouts.draw_layout: 9,
    draw_layouts.draw_take: 6,
    draw_layouts.draw_sizes_of: 3,
    draw_reductions.draw_classes: 1,
    draw_reductions.draw_images: 2,
    draw_resources.draw_scopes: 1,
    draw_resources.draw_saved: 0.5,
    draw_flow.draw_nested_loops: 2,
    draw_reductions.draw_several: 2,
    draw_layouts.draw_placed: 4,
    draw_layouts.draw_counted: 2,
    draw_layouts.draw_looked_up: 3,
    draw_resources.draw_asked: 1,
    draw_reductions.draw_loss: 3,
    draw_sources.draw_random_numbers: 1,
    draw_flow.draw_cond: 4,
    draw_flow.draw_cond_of_two: 2,
    draw_flow.draw_cond_that_assigns: 2,
    draw_flow.draw_loop: 4,
    draw_flow.draw_rows: 4,
    draw_flow.draw_array_loop: 1,
    draw_updates.draw_assign: 5,
    draw_updates.draw_after: 4,
    draw_updates.draw_grouped: 2,
    draw_updates.draw_gradients: 5,
    draw_updates.draw_train: 3,
    draw_updates.draw_average: 1,
    draw_resources.draw_queue: 2,
    draw_resources.draw_sparse: 1,
    draw_resources.draw_strings: 2,
    draw_mistakes.draw_mistake: 2,
}
"""The kinds of statements, with their weights."""

LOOPS = (
    draw_flow.draw_loop,
    draw_flow.draw_rows,
    draw_flow.draw_array_loop,
    draw_flow.draw_nested_loops,
)


def draw(seed: int) -> list[Statement]:
    """Returns the program of a seed, the same at every call."""
    drawer = Drawer(seed)
    kinds, weights = list(WEIGHTS), list(WEIGHTS.values())
    for _ in range(drawer.random.choice((1, 1, 2))):
        draw_sources.draw_placeholder(drawer)
        draw_sources.draw_variable(drawer)
        for _ in range(drawer.random.randint(4, 16)):
            (kind,) = drawer.random.choices(kinds, weights)
            drawer.looping = kind in LOOPS
            kind(drawer)
        draw_steps.draw_all_steps(drawer)
    return drawer.statements
