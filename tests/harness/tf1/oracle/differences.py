"""What is different on purpose, with the cases that show it: the rows of a table of docs/tf1_differences.md.

``python -m tests.harness.tf1.oracle.differences docs/tf1_differences.md`` writes that table anew; a
test compares.
"""

from __future__ import annotations

import fnmatch
import pathlib
import sys
from dataclasses import dataclass, field
from typing import Any

from tests.harness.tf1.oracle.case import COMPUTES, REFUSES

NAN = float("nan")
LEAST = -(2**31)
BEGIN, END = "<!-- differences: begin -->", "<!-- differences: end -->"
"""Between these lines of the page stands what ``page`` gives."""


@dataclass(frozen=True)
class Difference:
    """One row.

    Attributes:
        what: what is asked of both.
        there: what TensorFlow gives.
        here: what harness.tf1 gives, and why.
        cases: name of a case, or a pattern for several -> what is expected here: ``COMPUTES``
            (TensorFlow refuses it), ``REFUSES`` (with an error), or the values of the first result.
        programs: names of programs that show it; ``test_behaviours`` says what they give here.
    """

    what: str
    there: str
    here: str
    cases: dict[str, Any] = field(default_factory=dict)
    programs: tuple[str, ...] = ()


_SECOND_LOST = [1.0, 2.0, NAN, NAN]
DIFFERENCES = (
    Difference(
        "A computed index out of range in `tf.gather`, `tf.gather_nd`, `tf.nn.embedding_lookup`, "
        "`x[i]`",
        "`InvalidArgumentError`",
        "NaN, or the integer furthest from zero, because a compiled program cannot raise; "
        "`tf.Assert` checks. "
        "It never counts from the end, except in `x[i]` down to `-size`",
        {
            "gather/negative": _SECOND_LOST,
            "gather/beyond": _SECOND_LOST,
            "gather/axis 1 negative": [NAN] * 3,
            "gather/integers beyond": [7, LEAST],
            "gather/uint8 beyond": [7, 255],
            "gather/bool beyond": [False, True],
            "gather_nd/negative": [2.0, NAN],
            "gather_nd/beyond": [2.0, NAN],
            "nn.embedding_lookup/negative": _SECOND_LOST,
            "nn.embedding_lookup/beyond": _SECOND_LOST,
            "nn.embedding_lookup/parts negative": _SECOND_LOST,
            "@getitem/unknown beyond": [NAN] * 3,
            "@getitem/computed beyond": [NAN] * 3,
            "@getitem/computed below": [NAN] * 3,
        },
    ),
    Difference(
        "A literal index out of range in `x[i]`",
        "`ValueError` when the graph is built",
        "`IndexError` then, as in Python",
        {
            f"@getitem/{label}": REFUSES
            for label in ("beyond", "below", "column beyond", "ellipsis beyond", "variable beyond")
        },
    ),
    Difference(
        "A computed label that is no class in `tf.nn.sparse_softmax_cross_entropy_with_logits`",
        "`InvalidArgumentError` on CPU, NaN on GPU",
        "NaN, the gradient too",
        {
            "nn.sparse_softmax_cross_entropy_with_logits/negative": [0.40760595, NAN],
            "nn.sparse_softmax_cross_entropy_with_logits/beyond": [NAN, 0.16984604],
        },
    ),
    Difference(
        "A computed index out of range in `tf.scatter_nd`, `tf.unsorted_segment_sum`",
        "`InvalidArgumentError` on CPU, left out on GPU",
        "is left out",
        {
            "scatter_nd/negative": [1.0, 0.0, 0.0],
            "scatter_nd/beyond": [1.0, 0.0, 0.0],
            "unsorted_segment_sum/beyond": [6.0, 8.0, 0.0, 0.0, 0.0, 0.0],
        },
    ),
    Difference(
        "An integer divided by zero, or to a negative power",
        "an error when the step runs",
        "some number, as above",
        {
            **{
                f"{op}/by zero": COMPUTES
                for op in ("div", "floordiv", "floormod", "mod", "truncatediv", "truncatemod")
            },
            "pow/negative exponent": COMPUTES,
        },
    ),
    Difference(
        "`tf.invert_permutation` of a computed vector that is none",
        "`InvalidArgumentError`",
        "some numbers",
        {"invert_permutation/none": COMPUTES},
    ),
    Difference(
        "`int32 / int32` in `tf.divide`, `tf.truediv` and the operator",
        "float64",
        "float32, as in JAX: cast to float64 before",
        {
            "divide/int32": [3.5, -3.5, -3.5, 3.5, 0.0, 2.0, 1.0],
            "divide/literal": [2.5, -2.5],
            "truediv/int32": [3.5, -3.5, -3.5, 3.5, 0.0, 2.0, 1.0],
            "truediv/literal": [2.5, -2.5],
            "truediv/two literals": [3.5, -3.5],
            "truediv/by zero": COMPUTES,
            "truediv/large": [16777216.0, -16777216.0],
            "@truediv/int32": [3.5, -3.5, 7 / 3],
            "@truediv/literal": [3.5, -3.5, 3.5],
        },
    ),
    Difference(
        "Operators between tensors of two dtypes, or of integers with a fraction",
        "`TypeError`",
        "promoted by JAX's rules, because operators are the runtime's; functions of `tf` refuse "
        "them too",
        {"@*/mixed": COMPUTES, "@*/fraction beside integers": COMPUTES},
    ),
    Difference(
        "A dtype for which TensorFlow has no kernel",
        "an error, when the graph is built or when the step runs",
        "is computed: XLA makes the kernel",
        {
            **{f"realdiv/{label}": COMPUTES for label in ("int32", "int64", "literal")},
            "pow/uint8": COMPUTES,
            "squared_difference/*int8": COMPUTES,
            "truncatemod/*int8": COMPUTES,
            "truncatemod/float16": COMPUTES,
            "rint/float16": COMPUTES,
        },
    ),
    Difference(
        "Gradients of `tf.gather` and `tf.nn.embedding_lookup`",
        "`IndexedSlices`, in whose norm (`tf.clip_by_global_norm`) a row that is looked up twice "
        "counts as two rows",
        "dense, and `IndexedSlices` of all rows: a step moves all of a large table; the norm is "
        "that of the sum",
        {
            "gather/slope": [1.0, 2.0, 1.0, 2.0, 5.0, 6.0],
            "nn.embedding_lookup/slope": [1.0, 2.0, 1.0, 2.0, 5.0, 6.0],
        },
        ("norm_of_a_row_that_is_looked_up_twice",),
    ),
    Difference(
        "The derivative of `tf.exp` and the like whose result is fed",
        "of the result",
        "of the operand",
        programs=("derivative_of_a_fed_result",),
    ),
    Difference(
        "Computing with strings: `tf.equal`, `tf.reshape`, `tf.fill`",
        "works",
        "is refused: strings travel, are sliced and hashed, but nothing else is computed of them",
        {"equal/strings": REFUSES, "reshape/strings": REFUSES, "fill/string": REFUSES},
    ),
    Difference(
        "`tf.where(condition)` alone",
        "the places, as many as there are",
        "is refused: its result has no static shape",
        {"where/condition alone": REFUSES},
    ),
    Difference(
        "`x[[0, 1]]`",
        "works",
        "is refused: `tf.gather` takes a list of places",
        {"@getitem/list": REFUSES},
    ),
    Difference(
        "`tf.linspace` between integers",
        "float64 in 2.21, refused in 1.x",
        "float32",
        {
            "lin_space/of integers": [0.0, 1.0, 2.0, 3.0, 4.0],
            "linspace/of integers": [0.0, 1.0, 2.0, 3.0, 4.0],
        },
    ),
    Difference(
        "NaN in a window of `tf.nn.max_pool`",
        "is passed over on CPU",
        "NaN, as on GPU: a diverged model shows",
        {"nn.max_pool/nan": [NAN]},
    ),
    Difference(
        "The static shape of `tf.nn.conv2d_transpose` of a batch of unknown size",
        "`output_shape` in 1.x, with an unknown batch in 2.21",
        "`output_shape`, as in 1.x; a batch of another size is refused in the step",
        {
            "nn.conv2d_transpose/unknown batch": [
                14.0,
                -7.0,
                2.0,
                1.0,
                5.0,
                -4.0,
                2.0,
                -2.0,
                -10.0,
                14.0,
                -7.0,
                2.0,
                -1.0,
                5.0,
                -4.0,
                2.0,
                -4.0,
                -1.0,
                2.0,
                -5.0,
                -13.0,
                2.0,
                2.0,
                -8.0,
                8.0,
                -4.0,
                -1.0,
                2.0,
                17.0,
                -13.0,
                2.0,
                2.0,
            ]
        },
    ),
    Difference(
        "An operation given two dtypes, or an index that is no integer",
        "`ValueError` in a few functions, `TypeError` in the others",
        "always `TypeError`; in `x[0.5]` `InvalidArgumentError`, which is a `ValueError`",
        {
            "div/mixed": REFUSES,
            "accumulate_n/mixed": REFUSES,
            "nn.bias_add/mixed": REFUSES,
            "@getitem/fraction": REFUSES,
        },
    ),
    Difference(
        "`axis` of `tf.nn.softmax_cross_entropy_with_logits`, two strides of `tf.nn.conv2d`",
        "taken by 2.21, or another error",
        "refused, as in 1.0",
        {
            "nn.softmax_cross_entropy_with_logits/axis 0": REFUSES,
            "nn.conv2d/too few strides": REFUSES,
        },
    ),
    Difference(
        "`tf.train.ExponentialMovingAverage.apply` after `reuse_variables()`",
        "`ValueError`: there is no average to reuse",
        "makes the average",
        programs=("average_of_a_variable_after_reuse_variables",),
    ),
)


def of(name: str) -> tuple[Difference, Any] | None:
    """The difference that the case ``name`` shows and what is expected here; None for all others."""
    for difference in DIFFERENCES:
        for pattern, here in difference.cases.items():
            if fnmatch.fnmatchcase(name, pattern.replace("[", "[[]")):
                return difference, here
    return None


def page() -> str:
    """The generated table, in Markdown."""
    rows = "\n".join(f"| {d.what} | {d.there} | {d.here} |" for d in DIFFERENCES)
    return f"| asked | TensorFlow 1 | here |\n|---|---|---|\n{rows}\n"


def main(path: pathlib.Path) -> None:
    """Writes the table into the page, between its two marks."""
    before, _, rest = path.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    path.write_text(f"{before}{BEGIN}\n{page()}{END}{after}")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
