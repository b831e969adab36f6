"""``tf.contrib.slim.model_analyzer``: the sizes of a graph and of its variables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

import runtime as rt
from harness.tf1.ops.lift import Public
from harness.tf1.ops.shapes import TensorShape

public = Public("tf.contrib.slim.model_analyzer")


@public.add()
def tensor_description(var: rt.Tensor | rt.Variable) -> str:
    """Returns type and shape as text: "(float32 8x4)"."""
    sizes = "x".join("?" if size is None else str(size) for size in var.shape or ())
    return f"({np.dtype(var.dtype).name} {sizes})"


def _count_elements(var: rt.Tensor | rt.Variable) -> int:
    """Returns the number of elements; 0 where the shape is not known."""
    return TensorShape(var.shape).num_elements() or 0


def _print_title(print_info: bool, text: str) -> None:
    if print_info:
        print(f"---------\n{text}\n---------")


@public.add()
def analyze_ops(graph: rt.Graph, print_info: bool = False) -> int:
    """Returns the number of elements of all tensors of a graph; ``print_info`` prints a line for each operation."""
    total = 0
    _print_title(print_info, "Operations: name -> (type shapes) [size]")
    for op in graph.get_operations():
        size = sum(map(_count_elements, op.outputs))
        shapes = ", ".join(tensor_description(output) for output in op.outputs if output.shape)
        if print_info:
            print(op.name, "\t->", shapes, f"[{size}]")
        total += size
    return total


@public.add()
def analyze_vars(variables: Iterable[Any], print_info: bool = False) -> tuple[int, int]:
    """Returns the elements and bytes of variables; ``print_info`` prints a line for each."""
    total = total_bytes = 0
    _print_title(print_info, "Variables: name (type shape) [size]")
    for variable in variables:
        size = _count_elements(variable)
        in_bytes = size * np.dtype(variable.dtype).itemsize
        total, total_bytes = total + size, total_bytes + in_bytes
        if print_info:
            print(variable.name, tensor_description(variable), f"[{size}, bytes: {in_bytes}]")
    if print_info:
        print(f"Total size of variables: {total}\nTotal bytes of variables: {total_bytes}")
    return total, total_bytes
