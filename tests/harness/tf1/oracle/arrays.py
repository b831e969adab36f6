"""Cases of tensors: shapes, making, joining and cutting, indices, values and variables, random tensors, limits."""

from __future__ import annotations

import numpy as np

from tests.harness.tf1.oracle.case import Call, Const, Fed, Np, Table, Type, Var

CASES = Table()
NAN, INF = np.nan, np.inf
M = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
CUBE = np.arange(24.0).reshape(2, 3, 4)
UNKNOWN = [None, 3]

# -- shapes --------------------------------------------------------------------------------------------------------

for _op in ("shape", "size", "rank"):
    CASES.add(_op, "float32", Fed(M))
    CASES.add(_op, "unknown", Fed(M, shape=UNKNOWN))
    CASES.add(_op, "scalar", Fed(1.0))
    CASES.add(_op, "empty", Fed(np.zeros([0, 3])))
    CASES.add(_op, "literal", [[1, 2]])
    CASES.add(_op, "named", Fed(M), name="mine")
    if _op != "rank":
        CASES.add(_op, "int64", Fed(M), out_type=Type("int64"))
CASES.add("shape_n", "two", [Fed(M), Fed([1.0, 2.0])])
for _label, _shape in {
    "list": [3, 2],
    "rest": [-1, 2],
    "flat": [-1],
    "number": 6,
    "array": Np([3, 2], "int64"),
    "tensor": Const([3, 2], "int32"),
    "two rests": [-1, -1],
    "too many": [4, 2],
    "rest that does not fit": [4, -1],
    "scalar of six": [],
    "tuple": (2, 3, 1),
    "below": [-2, 3],
}.items():
    CASES.add("reshape", _label, Fed(M), _shape)
CASES.add("reshape", "unknown", Fed(M, shape=UNKNOWN), [-1, 1])
CASES.add("reshape", "unknown to flat", Fed(M, shape=[None, None]), [-1])
CASES.add("reshape", "int64", Fed([[1, 2]], "int64"), [2])
CASES.add("reshape", "empty", Fed(np.zeros([0, 3])), [3, -1])
CASES.add(
    "reshape",
    "by shape of another",
    Fed(M),
    Call("shape", (Fed([[1.0], [2.0], [3.0], [4.0], [5.0], [6.0]]),)),
)
CASES.add("reshape", "strings", Const(["a", "b"], "string"), [2, 1])
for _axis in (0, 1, 2, -1, -2, -3, 3, -4):
    CASES.add("expand_dims", f"axis {_axis}", Fed(M), _axis)
CASES.add("expand_dims", "dim", Fed(M), dim=0)
CASES.add("expand_dims", "both", Fed(M), axis=0, dim=0)
CASES.add("expand_dims", "no axis", Fed(M))
CASES.add("expand_dims", "unknown", Fed(M, shape=UNKNOWN), 1)
_ONES = np.ones([1, 2, 1])
for _label, _args, _kw in (
    ("all", (), {}),
    ("axis", (0,), {}),
    ("axis list", ([0, 2],), {}),
    ("axis -1", ([-1],), {}),
    ("squeeze_dims", (), {"squeeze_dims": [0]}),
    ("axis of two", ([1],), {}),
    ("axis beyond", ([3],), {}),
    ("no axes", ([],), {}),
    ("axis twice", ([0, 0],), {}),
):
    CASES.add("squeeze", _label, Fed(_ONES), *_args, **_kw)
CASES.add("squeeze", "unknown", Fed(_ONES, shape=[None, 2, 1]), [2])
for _label, _perm in {
    "pairs": [1, 0, 2],
    "array": Np([2, 0, 1], "int32"),
    "repeated": [0, 0, 1],
    "too few": [1, 0],
    "beyond": [0, 1, 3],
    "negative": [0, -1, 1],
}.items():
    CASES.add("transpose", _label, Fed(CUBE), _perm)
CASES.add("transpose", "reverse", Fed(CUBE))
CASES.add("transpose", "unknown", Fed(M, shape=UNKNOWN))
CASES.add("transpose", "complex64", Fed([[1j, 2]], "complex64"))
CASES.add("transpose", "scalar", Fed(1.0))
CASES.add("matrix_transpose", "cube", Fed(CUBE))
CASES.add("matrix_transpose", "vector", Fed([1.0]))
CASES.add("broadcast_to", "rows", Fed([1.0, 2.0]), [3, 2])
CASES.add("broadcast_to", "scalar", Fed(1), [2])
CASES.add("broadcast_to", "does not fit", Fed([1.0, 2.0]), [3])

# -- making --------------------------------------------------------------------------------------------------------

for _op in ("zeros", "ones"):
    CASES.add(_op, "list", [2, 3])
    CASES.add(_op, "scalar", [])
    CASES.add(_op, "number", 3)
    CASES.add(_op, "empty", [0, 2])
    CASES.add(_op, "array", Np([2, 3], "int64"))
    CASES.add(_op, "negative", [-1])
    CASES.add(_op, "by shape", Call("shape", (Fed(M, shape=UNKNOWN),)))
    for _dtype in ("int32", "int64", "bool", "float64", "complex64", "bfloat16", "uint8"):
        CASES.add(_op, _dtype, [2], Type(_dtype))
    CASES.add(_op, "dtype by keyword", [2], dtype="int32")
    CASES.add(_op, "named", [2], name="mine")
    CASES.add(f"{_op}_like", "float32", Fed(M))
    CASES.add(f"{_op}_like", "int64", Fed([1, 2], "int64"))
    CASES.add(f"{_op}_like", "bool", Fed([True], "bool"))
    CASES.add(f"{_op}_like", "other dtype", Fed(M), Type("int32"))
    CASES.add(f"{_op}_like", "unknown", Fed(M, shape=UNKNOWN))
    CASES.add(f"{_op}_like", "literal", [[1, 2]])
    CASES.add(f"{_op}_like", "empty", Fed(np.zeros([0])))
for _label, _value in {
    "float": 2.5,
    "int": 7,
    "bool": True,
    "int64": Np(7, "int64"),
    "fed": Fed(1.5),
    "vector": [1.0, 2.0],
    "string": "a",
}.items():
    CASES.add("fill", _label, [2, 2], _value)
CASES.add("fill", "empty", [0], 1.0)
CASES.add("fill", "by shape", Call("shape", (Fed(M, shape=UNKNOWN),)), 1)
CASES.add("eye", "square", 2)
CASES.add("eye", "columns", 2, 3)
CASES.add("eye", "int32", 2, dtype=Type("int32"))
CASES.add("eye", "batch", 2, batch_shape=[3])
CASES.add("eye", "none", 0)
for _op in ("lin_space", "linspace"):
    CASES.add(_op, "float32", 0.0, 1.0, 5)
    CASES.add(_op, "one", 2.0, 3.0, 1)
    CASES.add(_op, "backwards", 3.0, -3.0, 4)
    CASES.add(_op, "float64", Np(0, "float64"), Np(1, "float64"), 3)
    CASES.add(_op, "of integers", 0, 4, 5)
    CASES.add(_op, "none", 0.0, 1.0, 0)
for _label, _args, _kw in (
    ("limit", (5,), {}),
    ("start", (2, 5), {}),
    ("delta", (0, 10, 3), {}),
    ("down", (5, 0, -2), {}),
    ("none", (3, 3), {}),
    ("wrong way", (5, 0), {}),
    ("float", (0.0, 1.0, 0.25), {}),
    ("float limit", (3.0,), {}),
    ("mixed", (0, 1.5, 0.5), {}),
    ("int64", (Np(3, "int64"),), {}),
    ("dtype", (3,), {"dtype": Type("float32")}),
    ("named", (3,), {"name": "mine"}),
    ("delta zero", (0, 3, 0), {}),
    ("of a size", (Call("shape", (Fed(M),)),), {}),
    ("float64", (Np(3, "float64"),), {}),
    ("zero to three by keywords", (), {"start": 0, "limit": 3}),
):
    CASES.add("range", _label, *_args, **_kw)
for _label, _args, _kw in (
    ("plain", (3,), {}),
    ("on_value", (3,), {"on_value": 1}),
    ("on and off", (3, 5.0, -1.0), {}),
    ("off_value", (3,), {"off_value": 7}),
    ("bool", (3, True, False), {}),
    ("dtype", (3,), {"dtype": Type("int64")}),
    ("axis 0", (3,), {"axis": 0}),
    ("axis -1", (3,), {"axis": -1}),
    ("depth 0", (0,), {}),
    ("other dtypes", (3, 1.0, 0), {}),
    ("on_value against dtype", (3,), {"on_value": 1.0, "dtype": Type("int32")}),
    ("named", (3,), {"name": "mine"}),
):
    CASES.add("one_hot", _label, Fed([0, 2, -1, 5], "int64"), *_args, **_kw)
CASES.add("one_hot", "rows", Fed([[0, 2], [1, 1]], "int32"), 3)
CASES.add("one_hot", "scalar", Fed(1, "int32"), 3)
CASES.add("one_hot", "uint8", Fed([0, 2], "uint8"), 3)
CASES.add("one_hot", "fractions", Fed([0.0, 2.0]), 3)
CASES.add("one_hot", "unknown", Fed([0, 2], "int32", [None]), 3)
CASES.add("diag", "vector", Fed([1.0, 2.0]))
CASES.add("diag", "matrix", Fed([[1.0, 2.0], [3.0, 4.0]]))
CASES.add("diag", "int32", Fed([1, 2], "int32"))
CASES.add("diag_part", "matrix", Fed([[1.0, 2.0], [3.0, 4.0]]))
CASES.add("diag_part", "not square", Fed(M))
CASES.add("matrix_diag", "vector", Fed([1.0, NAN]))
CASES.add("matrix_diag", "rows", Fed(M))
CASES.add("matrix_diag", "bool", Fed([True, False], "bool"))
CASES.add("matrix_diag_part", "matrix", Fed(M))
CASES.add("matrix_diag_part", "cube", Fed(CUBE))
for _lower, _upper in ((0, 0), (-1, 0), (0, -1), (1, 1), (1, 0), (-1, -1)):
    CASES.add("matrix_band_part", f"{_lower} and {_upper}", Fed(CUBE[0]), _lower, _upper)
CASES.add("matrix_band_part", "beyond", Fed(M), 5, 0)
CASES.add("sequence_mask", "bool", Fed([1, 3, 0], "int32"), 3)
CASES.add("sequence_mask", "float32", Fed([1, 3], "int32"), 4, dtype=Type("float32"))
CASES.add("sequence_mask", "rows", Fed([[1, 3], [2, 0]], "int32"), 3)
CASES.add("sequence_mask", "too long", Fed([9, -1], "int32"), 3)

# -- joining and cutting -------------------------------------------------------------------------------------------

for _op in ("concat",):
    CASES.add(_op, "axis 0", [Fed(M), Fed(M)], 0)
    CASES.add(_op, "axis 1", [Fed(M), Fed(M)], 1)
    CASES.add(_op, "axis -1", [Fed(M), Fed(M)], -1)
    CASES.add(_op, "old order", 1, [Fed(M), Fed(M)], asked=Call("concat", ([Fed(M), Fed(M)], 1)))
    CASES.add(_op, "one", [Fed(M)], 0)
    CASES.add(_op, "alone", Fed(M), 0)
    CASES.add(_op, "axis beyond", [Fed(M), Fed(M)], 2)
    CASES.add(_op, "scalars", [Fed(1.0), Fed(2.0)], 0)
    CASES.add(_op, "other sizes", [Fed(M), Fed([[1.0, 2.0]])], 0)
    CASES.add(_op, "mixed", [Fed([1.0]), Fed([1], "int32")], 0)
    CASES.add(_op, "literal beside int64", [Fed([1], "int64"), [2]], 0)
    CASES.add(_op, "literal beside float32", [Fed([1.0]), [2]], 0)
    CASES.add(_op, "empty part", [Fed(np.zeros([0, 3])), Fed(M)], 0)
    CASES.add(_op, "unknown", [Fed(M, shape=UNKNOWN), Fed(M)], 0)
    CASES.add(_op, "bool", [Fed([True], "bool"), Fed([False], "bool")], 0)
    CASES.add(_op, "axis tensor", [Fed(M), Fed(M)], Const(1, "int32"))
    CASES.add(_op, "named", [Fed(M), Fed(M)], 0, name="mine")
CASES.add("concat_v2", "axis", [Fed(M), Fed(M)], 1, asked=Call("concat", ([Fed(M), Fed(M)], 1)))
for _op in ("stack", "parallel_stack"):
    CASES.add(_op, "two", [Fed([1.0, 2.0]), Fed([3.0, 4.0])])
    CASES.add(_op, "scalars", [Fed(1.0), Fed(2.0)])
    CASES.add(_op, "other sizes", [Fed([1.0]), Fed([3.0, 4.0])])
    CASES.add(_op, "mixed", [Fed([1.0]), Fed([3], "int32")])
for _axis in (1, -1, 2, -3, -4):
    CASES.add("stack", f"axis {_axis}", [Fed(M), Fed(M)], _axis)
CASES.add("stack", "literal beside int64", [Fed(1, "int64"), 2])
CASES.add("stack", "literal beside float32", [Fed(1.0), 2])
CASES.add("stack", "literals", [1, 2, 3])
CASES.add("stack", "none", [])
CASES.add("stack", "unknown", [Fed(M, shape=UNKNOWN), Fed(M)])
CASES.add(
    "pack", "old name", [Fed([1.0]), Fed([2.0])], asked=Call("stack", ([Fed([1.0]), Fed([2.0])],))
)
CASES.add("unstack", "rows", Fed(M))
CASES.add("unstack", "axis 1", Fed(M), axis=1)
CASES.add("unstack", "axis -1", Fed(M), axis=-1)
CASES.add("unstack", "num", Fed(M, shape=UNKNOWN), num=2)
CASES.add("unstack", "other num", Fed(M), num=3)
CASES.add("unstack", "unknown", Fed(M, shape=UNKNOWN))
CASES.add("unstack", "axis beyond", Fed(M), axis=2)
CASES.add("unstack", "scalar", Fed(1.0))
CASES.add("unstack", "literal", [[1, 2], [3, 4]])
CASES.add("unpack", "old name", Fed(M), asked=Call("unstack", (Fed(M),)))
_TEN = np.arange(10.0)
for _label, _args, _kw in (
    ("parts", (2,), {}),
    ("sizes", ([2, 8],), {}),
    ("sizes and rest", ([2, -1, 3],), {}),
    ("too few", ([2, 3],), {}),
    ("too many", ([8, 3],), {}),
    ("rest below zero", ([8, -1, 3],), {}),
    ("uneven", (3,), {}),
    ("one", (1,), {}),
    ("axis beyond", (2, 1), {}),
    ("named", (2,), {"name": "mine"}),
    ("size zero", ([0, 10],), {}),
    ("two rests", ([-1, -1],), {}),
    ("axis -1", (2, -1), {}),
    ("num", ([4, 6],), {"num": 2}),
):
    CASES.add("split", _label, Fed(_TEN), *_args, **_kw)
CASES.add("split", "axis 1", Fed(CUBE), 3, 1)
CASES.add("split", "unknown by sizes", Fed(_TEN, shape=[None]), [4, 6])
CASES.add("split", "unknown by parts", Fed(M, shape=[None, 3]), 2)
CASES.add("split", "old order", 1, 3, Fed(M), asked=Call("split", (Fed(M), 3, 1)))
CASES.add(
    "split",
    "old keywords",
    split_dim=1,
    num_split=3,
    value=Fed(M),
    asked=Call("split", (Fed(M), 3, 1)),
)
CASES.add("split_v", "sizes", Fed(M), [1, 2], 1, asked=Call("split", (Fed(M), [1, 2], 1)))
for _label, _begin, _size in (
    ("within", [0, 1], [2, 2]),
    ("to the end", [1, 0], [-1, 1]),
    ("beyond", [1, 0], [3, 2]),
    ("below", [-1, 0], [1, 2]),
    ("nothing", [0, 0], [0, 3]),
    ("too few", [0], [1]),
    ("arrays", Np([0, 1], "int64"), Np([1, 1], "int64")),
    ("start beyond", [3, 0], [-1, 1]),
):
    CASES.add("slice", _label, Fed(M), _begin, _size)
CASES.add("slice", "unknown", Fed(M, shape=UNKNOWN), [1, 0], [-1, 2])
CASES.add("slice", "begin that is fed", Fed(_TEN), Fed([2], "int32"), [3])
CASES.add("strided_slice", "plain", Fed(_TEN), [1], [7])
CASES.add("strided_slice", "strides", Fed(_TEN), [1], [7], [2])
CASES.add("strided_slice", "backwards", Fed(_TEN), [7], [1], [-2])
CASES.add("strided_slice", "two axes", Fed(M), [0, 1], [2, 3], [1, 1])
CASES.add("strided_slice", "fewer axes", Fed(M), [1], [2])
CASES.add("strided_slice", "beyond", Fed(_TEN), [5], [100])
CASES.add("strided_slice", "negative", Fed(_TEN), [-3], [-1])
CASES.add("strided_slice", "stride zero", Fed(_TEN), [1], [7], [0])
for _label, _item in {
    "number": 1,
    "negative": -1,
    "beyond": 2,
    "below": -3,
    "slice": slice(0, 1),
    "slice beyond": slice(1, 100),
    "step": slice(None, None, 2),
    "backwards": slice(None, None, -1),
    "column": (slice(None), 1),
    "column beyond": (slice(None), 3),
    "both": (1, 2),
    "ellipsis": (Ellipsis, 0),
    "ellipsis beyond": (Ellipsis, 3),
    "new axis": (None, 1),
    "new axis in the middle": (slice(None), None, slice(None)),
    "too many": (0, 0, 0),
    "empty": slice(2, 1),
    "negative slice": slice(-1, None),
    "list": [0, 1],
    "fraction": 0.5,
}.items():
    CASES.add("@getitem", _label, Fed(M), _item)
CASES.add("@getitem", "unknown", Fed(M, shape=UNKNOWN), -2)
CASES.add("@getitem", "unknown beyond", Fed(M, shape=UNKNOWN), 2)
CASES.add("@getitem", "slice of unknown", Fed(M, shape=UNKNOWN), slice(1, None))
CASES.add("@getitem", "computed", Fed(M), Fed(1, "int32"))
CASES.add("@getitem", "computed negative", Fed(M), Fed(-1, "int32"))
CASES.add("@getitem", "computed beyond", Fed(M), Fed(5, "int32"))
CASES.add("@getitem", "computed below", Fed(M), Fed(-4, "int32"))
CASES.add("@getitem", "variable", Var(M), 1)
CASES.add("@getitem", "variable beyond", Var(M), 2)
CASES.add("@getitem", "scalar", Fed(1.0), 0)
CASES.add("tile", "rows", Fed(M), [2, 1])
CASES.add("tile", "both", Fed(M), [2, 3])
CASES.add("tile", "none", Fed(M), [0, 1])
CASES.add("tile", "too few", Fed(M), [2])
CASES.add("tile", "too many", Fed(M), [2, 1, 1])
CASES.add("tile", "unknown", Fed(M, shape=UNKNOWN), [1, 2])
CASES.add("tile", "negative", Fed(M), [-1, 1])
for _mode in ("CONSTANT", "REFLECT", "SYMMETRIC"):
    CASES.add("pad", _mode, Fed(M), [[1, 0], [0, 2]], _mode)
    CASES.add("pad", f"{_mode} too wide", Fed(M), [[3, 0], [0, 0]], _mode)
CASES.add("pad", "lower case", Fed(M), [[1, 0], [0, 2]], "constant")
CASES.add("pad", "value", Fed(M), [[1, 0], [0, 2]], constant_values=7)
CASES.add("pad", "int32", Fed([1, 2], "int32"), [[1, 1]])
CASES.add("pad", "bool", Fed([True], "bool"), [[1, 1]])
CASES.add("pad", "banana", Fed(M), [[1, 0], [0, 2]], "BANANA")
CASES.add("pad", "too few", Fed(M), [[1, 0]])
CASES.add("pad", "negative", Fed(M), [[-1, 0], [0, 0]])
CASES.add("pad", "unknown", Fed(M, shape=UNKNOWN), [[1, 1], [0, 0]])
for _op in ("reverse", "reverse_v2"):
    for _label, _axis in {
        "axis": [0],
        "axis -1": [-1],
        "both": [0, 1],
        "none": [],
        "beyond": [2],
        "twice": [0, 0],
        "array": Np([1], "int32"),
    }.items():
        CASES.add(_op, _label, Fed(M), _axis)
CASES.add("reverse", "flags of 0.8", Fed(M), [False, True], asked=Call("reverse", (Fed(M), [1])))
CASES.add("reverse", "number", Fed(M), 0)

ROWS = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
for _label, _indices in {
    "fed": Fed([2, 0], "int32"),
    "int64": Fed([2, 0], "int64"),
    "scalar": Fed(1, "int32"),
    "matrix": Fed([[0, 1], [2, 2]], "int32"),
    "literal": [2, 0],
    "negative": Fed([0, -1], "int32"),
    "beyond": Fed([0, 3], "int32"),
    "literal negative": [-1],
    "literal beyond": [3],
    "empty": Fed([], "int32"),
    "fractions": Fed([0.0, 1.0]),
    "uint8": Fed([0, 1], "uint8"),
    "constant": Const([1, 0], "int32"),
}.items():
    CASES.add("gather", _label, Fed(ROWS), _indices)
CASES.add("gather", "axis 1", Fed(ROWS), Fed([1, 0], "int32"), axis=1)
CASES.add("gather", "axis -1", Fed(ROWS), Fed([1, 0], "int32"), axis=-1)
CASES.add("gather", "axis 1 literal beyond", Fed(ROWS), [2], axis=1)
CASES.add("gather", "axis 1 negative", Fed(ROWS), Fed([-1], "int32"), axis=1)
CASES.add("gather", "axis beyond", Fed(ROWS), Fed([0], "int32"), axis=2)
CASES.add("gather", "integers beyond", Fed([7, 8, 9], "int32"), Fed([0, 3], "int32"))
CASES.add("gather", "uint8 beyond", Fed([7, 8, 9], "uint8"), Fed([0, 3], "int32"))
CASES.add("gather", "bool beyond", Fed([False, False], "bool"), Fed([0, 3], "int32"))
CASES.add("gather", "scalar params", Fed(1.0), Fed([0], "int32"))
CASES.add("gather", "variable", Var(ROWS), Fed([2, 0], "int32"))
CASES.add("gather", "slope", Fed(ROWS), Fed([0, 0, 2], "int32"), case={"slopes": True})
CASES.add("gather", "named", Fed(ROWS), Fed([0], "int32"), name="mine")
for _label, _indices in {
    "elements": Fed([[0, 1], [2, 0]], "int32"),
    "rows": Fed([[2], [0]], "int32"),
    "literal": [[0, 1]],
    "negative": Fed([[0, 1], [-1, 0]], "int32"),
    "beyond": Fed([[0, 1], [0, 2]], "int32"),
    "literal negative": [[-1]],
    "literal beyond": [[3]],
    "empty": Fed(np.zeros([0, 2]), "int32"),
    "too many": Fed([[0, 0, 0]], "int32"),
    "scalar place": Fed([1], "int32"),
    "everything": Fed(np.zeros([2, 0]), "int32"),
}.items():
    CASES.add("gather_nd", _label, Fed(ROWS), _indices)
CASES.add("scatter_nd", "adds", Fed([[1], [1], [3]], "int32"), Fed([1.0, 2.0, 4.0]), [5])
CASES.add("scatter_nd", "literal", [[1], [3]], [1.0, 2.0], [5])
CASES.add("scatter_nd", "rows", Fed([[1]], "int32"), Fed([[1.0, 2.0]]), [3, 2])
CASES.add("scatter_nd", "int32", Fed([[1], [1]], "int32"), Fed([1, 2], "int32"), [3])
CASES.add("scatter_nd", "negative", Fed([[0], [-1]], "int32"), Fed([1.0, 2.0]), [3])
CASES.add("scatter_nd", "beyond", Fed([[0], [3]], "int32"), Fed([1.0, 2.0]), [3])
CASES.add("scatter_nd", "literal negative", [[-1]], [1.0], [3])
CASES.add("scatter_nd", "literal beyond", [[3]], [1.0], [3])
CASES.add("scatter_nd", "other sizes", Fed([[1], [2]], "int32"), Fed([1.0]), [3])
for _op in ("where",):
    CASES.add(_op, "same shape", Fed([True, False], "bool"), Fed([1.0, 2.0]), Fed([3.0, 4.0]))
    CASES.add(
        _op,
        "rows",
        Fed([True, False], "bool"),
        Fed([[1.0, 2.0], [3.0, 4.0]]),
        Fed([[5.0, 6.0], [7.0, 8.0]]),
    )
    CASES.add(_op, "scalar", Fed(True, "bool"), Fed([1.0, 2.0]), Fed([3.0, 4.0]))
    CASES.add(
        _op, "nan is not chosen", Fed([True, False], "bool"), Fed([1.0, NAN]), Fed([NAN, 4.0])
    )
    CASES.add(_op, "mixed", Fed([True], "bool"), Fed([1.0]), Fed([3], "int32"))
    CASES.add(_op, "int32 condition", Fed([1, 0], "int32"), Fed([1.0, 2.0]), Fed([3.0, 4.0]))
    CASES.add(_op, "other shapes", Fed([True, False], "bool"), Fed([1.0, 2.0]), Fed(3.0))
    CASES.add(
        _op,
        "matrix condition of a vector",
        Fed([[True, False]], "bool"),
        Fed([1.0, 2.0]),
        Fed([3.0, 4.0]),
    )
    CASES.add(_op, "literals", [True, False], [1, 2], [3, 4])
    CASES.add(_op, "int64", Fed([True, False], "bool"), Fed([1, 2], "int64"), Fed([3, 4], "int64"))
    CASES.add(
        _op,
        "slope",
        Fed([True, False], "bool"),
        Fed([1.0, 2.0]),
        Fed([3.0, 4.0]),
        case={"slopes": True},
    )
    CASES.add(_op, "x alone", Fed([True, False], "bool"), Fed([1.0, 2.0]))
_sel = (Fed([True, False], "bool"), Fed([1.0, 2.0]), Fed([3.0, 4.0]))
CASES.add("select", "old name", *_sel, asked=Call("where", _sel))
CASES.add("where", "condition alone", Fed([True, False], "bool"))
CASES.add("invert_permutation", "fed", Fed([2, 0, 1], "int32"))
CASES.add("invert_permutation", "literal", [2, 0, 1])
CASES.add("invert_permutation", "int64", Fed([1, 0], "int64"))
CASES.add("invert_permutation", "literal that is none", [2, 0, 0])
CASES.add("invert_permutation", "none", Fed([2, 0, 0], "int32"))
CASES.add("invert_permutation", "fractions", Fed([1.0, 0.0]))
CASES.add("meshgrid", "xy", Fed([1.0, 2.0, 3.0]), Fed([4.0, 5.0]))
CASES.add("meshgrid", "ij", Fed([1.0, 2.0, 3.0]), Fed([4.0, 5.0]), indexing="ij")
CASES.add("meshgrid", "three", Fed([1, 2], "int32"), Fed([3, 4], "int32"), Fed([5, 6], "int32"))
CASES.add("meshgrid", "banana", Fed([1.0]), Fed([2.0]), indexing="banana")

# -- values --------------------------------------------------------------------------------------------------------

for _label, _value in {
    "int": 1,
    "float": 1.5,
    "bool": True,
    "complex": 1 + 2j,
    "large int": 2**40,
    "string": "a",
    "bytes": b"\x00a\x00",
    "list": [1, 2],
    "mixed list": [1, 2.5],
    "bools": [True, False],
    "bool and int": [True, 2],
    "strings": ["a", "bc"],
    "empty": [],
    "nested": [[1], [2]],
    "ragged": [[1], [2, 3]],
    "numpy float64": Np([1.0], "float64"),
    "numpy int64": Np([1], "int64"),
    "numpy uint8": Np(3, "uint8"),
    "none": None,
    "string and number": ["a", 1],
    "numpy bfloat16": Np([1.0], "bfloat16"),
    "tuple": (1, 2),
    "large list": [2**40, 1],
    "beyond int64": 2**70,
}.items():
    CASES.add("constant", _label, _value)
    if _label in (
        "int",
        "list",
        "mixed list",
        "numpy float64",
        "ragged",
        "none",
        "string",
        "empty",
    ):
        CASES.add("convert_to_tensor", _label, _value)
for _label, _value, _kw in (
    ("dtype", 1, {"dtype": Type("float32")}),
    ("fraction as int32", 1.5, {"dtype": Type("int32")}),
    ("whole as int64", [1], {"dtype": Type("int64")}),
    ("shape", 7, {"shape": [2, 2]}),
    ("shape filled up", [1, 2], {"shape": [4]}),
    ("too many for the shape", [1, 2, 3], {"shape": [2]}),
    ("reshaped", [1, 2, 3, 4], {"shape": [2, 2]}),
    ("verify_shape", [1, 2], {"shape": [4], "verify_shape": True}),
    ("numpy cast", Np([1.7], "float64"), {"dtype": Type("int32")}),
    ("dtype by name", 1, {"dtype": "float"}),
    ("int as bool", 1, {"dtype": Type("bool")}),
    ("bool as int32", True, {"dtype": Type("int32")}),
    ("too large for int8", 300, {"dtype": Type("int8")}),
    ("too large for int32", 2**40, {"dtype": Type("int32")}),
    ("string as int32", "a", {"dtype": Type("int32")}),
    ("number as string", 1, {"dtype": Type("string")}),
    ("int as complex64", 1, {"dtype": Type("complex64")}),
    ("negative as uint8", -1, {"dtype": Type("uint8")}),
    ("bfloat16", [1.5], {"dtype": Type("bfloat16")}),
    ("large as float32", 1e300, {"dtype": Type("float32")}),
    ("named", 1, {"name": "mine"}),
    ("half", 1, {"dtype": Type("half")}),
):
    CASES.add("constant", _label, _value, **_kw)
CASES.add("convert_to_tensor", "tensor", Fed([1.0]))
CASES.add("convert_to_tensor", "other dtype", Fed([1.0]), Type("int32"))
CASES.add("convert_to_tensor", "literal with dtype", [1, 2], Type("float64"))
CASES.add("convert_to_tensor", "tensors in a list", [Fed(1.0), 2.0])
CASES.add(
    "identity", "tensors in lists", Call("convert_to_tensor", ([[Fed(1.0), 2.0], [3.0, Fed(4.0)]],))
)
CASES.add("convert_to_tensor", "variable", Var([1.0]))
for _label, _value in {
    "fed": Fed([1.0]),
    "literal": [1, 2],
    "int64": Fed([1], "int64"),
    "string": Const("a", "string"),
    "variable": Var([1.0]),
    "unknown": Fed([1.0], shape=[None]),
}.items():
    CASES.add("identity", _label, _value)
    CASES.add("stop_gradient", _label, _value) if _label != "string" else None
CASES.add("stop_gradient", "slope", Fed([2.0]), case={"slopes": True})
CASES.add("check_numerics", "finite", Fed([1.0]), "bad")
CASES.add("check_numerics", "nan", Fed([NAN]), "bad")
CASES.add("check_numerics", "int32", Fed([1], "int32"), "bad")
CASES.add("placeholder_with_default", "int32", Const([1, 2], "int32"), [2])
CASES.add("placeholder_with_default", "unknown", Const([1.0, 2.0]), [None])
CASES.add("placeholder_with_default", "literal", [1.5, 2.0], [2])
CASES.add("placeholder_with_default", "other shape", [1.5, 2.0], [3])
CASES.add("tuple", "two", [Fed(1.0), Fed(2.0)])
CASES.add("tuple", "with none", [Fed(1.0), None])
CASES.add("group", "two", Fed(1.0), Fed(2.0))
CASES.add("group", "none")
CASES.add("group", "literal", 1)
CASES.add("no_op", "plain")
CASES.add("Print", "plain", Fed([1.0]), [Fed([2.0])], "said: ")
CASES.add("Assert", "holds", Fed(True, "bool"), [Fed([2.0])])
CASES.add("Assert", "does not hold", Fed(False, "bool"), [Fed([2.0])])
CASES.add("Assert", "literal", True, [1])
for _kind, _x, _y in (
    ("equal", [1, 2], [1, 2]),
    ("greater", [2, 3], [1, 2]),
    ("greater_equal", [2, 2], [1, 2]),
    ("less", [1, 2], [2, 3]),
    ("less_equal", [1, 2], [1, 3]),
):
    CASES.add(f"assert_{_kind}", "holds", Fed(_x, "int32"), Fed(_y, "int32"))
    CASES.add(
        f"assert_{_kind}",
        "does not hold",
        Fed(_y if _kind != "equal" else [2, 1], "int32"),
        Fed(_x, "int32"),
    )
    CASES.add(
        f"assert_{_kind}",
        "broadcast",
        Fed(_x, "int32"),
        _y[0] if _kind == "equal" else {"less": 9, "less_equal": 9}.get(_kind, 0),
    )
    CASES.add(f"assert_{_kind}", "empty", Fed(np.zeros([0])), Fed(np.zeros([0])))
for _kind, _x, _bad in (
    ("negative", [-1], [0]),
    ("non_negative", [0], [-1]),
    ("positive", [1], [0]),
):
    CASES.add(f"assert_{_kind}", "holds", Fed(_x, "int32"))
    CASES.add(f"assert_{_kind}", "does not hold", Fed(_bad, "int32"))
    CASES.add(f"assert_{_kind}", "literal", _x)
for _name in (
    "float32",
    "float64",
    "int32",
    "string",
    "bool",
    "complex64",
    "uint8",
    "float16",
    "bfloat16",
):
    CASES.add("placeholder", _name, Type(_name), [2, None], name="mine", case={"values": False})
CASES.add("placeholder", "number", Type("int32"), 100, case={"values": False})
CASES.add("placeholder", "no shape", Type("int32"), case={"values": False})
CASES.add("placeholder", "by name", "float", [2], case={"values": False})
CASES.add("placeholder", "nonsense", "banana", [2], case={"values": False})

# -- limits --------------------------------------------------------------------------------------------------------

for _label, _args in {
    "plain": (0.0, 6.0),
    "upside down": (6.0, 0.0),
    "tensors": (Fed(0.0), Fed(6.0)),
    "rows": ([0.0, 1.0, 0.0, 0.0, 0.0], 6.0),
}.items():
    CASES.add("clip_by_value", _label, Fed([-1.0, 0.0, 1.0, 6.0, 7.0]), *_args)
CASES.add("clip_by_value", "nan", Fed([NAN, INF, -INF]), 0.0, 6.0)
CASES.add("clip_by_value", "int32", Fed([-1, 9], "int32"), 0, 6)
CASES.add("clip_by_value", "fractions for int32", Fed([-1, 9], "int32"), 0.5, 6.5)
CASES.add(
    "clip_by_value", "slope", Fed([-1.0, 0.0, 1.0, 6.0, 7.0]), 0.0, 6.0, case={"slopes": True}
)
CASES.add(
    "clip_by_value", "slope of equal limits", Fed([-1.0, 1.0, 7.0]), 1.0, 1.0, case={"slopes": True}
)
for _label, _t, _n, _kw in (
    ("beyond", [3.0, 4.0], 4.0, {}),
    ("within", [3.0, 4.0], 6.0, {}),
    ("zero", [0.0, 0.0], 4.0, {}),
    ("axes", M, 2.0, {"axes": [1]}),
    ("at the edge", [3.0, 4.0], 5.0, {}),
    ("nan", [NAN, 1.0], 1.0, {}),
    ("infinite", [INF, 1.0], 1.0, {}),
):
    CASES.add("clip_by_norm", _label, Fed(_t), _n, **_kw)
    CASES.add(
        "clip_by_norm", f"slope {_label}", Fed(_t), _n, case={"slopes": True, "ulps": 64}, **_kw
    )
CASES.add("clip_by_average_norm", "beyond", Fed([3.0, 4.0]), 1.0)
CASES.add("clip_by_average_norm", "within", Fed([3.0, 4.0]), 9.0)
CASES.add("global_norm", "two", [Fed([3.0]), Fed([[4.0]])])
CASES.add("global_norm", "with none", [Fed([3.0]), None])
CASES.add("global_norm", "float64", [Fed([3.0], "float64"), Fed([4.0], "float64")])
CASES.add("clip_by_global_norm", "beyond", [Fed([3.0]), Fed([[4.0]])], 1.0)
CASES.add("clip_by_global_norm", "within", [Fed([3.0]), Fed([[4.0]])], 10.0)
CASES.add("clip_by_global_norm", "infinite", [Fed([INF]), Fed([4.0])], 1.0)
CASES.add("clip_by_global_norm", "nan", [Fed([NAN]), Fed([4.0])], 1.0)
CASES.add("clip_by_global_norm", "use_norm", [Fed([3.0]), Fed([4.0])], 1.0, use_norm=Fed(10.0))
CASES.add("clip_by_global_norm", "zero", [Fed([0.0]), Fed([0.0])], 1.0)
CASES.add("clip_by_global_norm", "a tensor", Fed([3.0]), 1.0)

# -- random tensors: dtypes, shapes, names, errors -----------------------------------------------------------------

_random = {"values": False}
for _op in ("random_normal", "truncated_normal", "random_uniform"):
    CASES.add(_op, "float32", [2, 3], case=_random)
    CASES.add(_op, "float64", [2], dtype=Type("float64"), case=_random)
    CASES.add(_op, "float16", [2], dtype=Type("float16"), case=_random)
    CASES.add(_op, "scalar", [], case=_random)
    CASES.add(_op, "empty", [0], case=_random)
    CASES.add(_op, "by shape", Call("shape", (Fed(M, shape=UNKNOWN),)), case=_random)
    CASES.add(_op, "named", [2], name="mine", case=_random)
    CASES.add(_op, "bool", [2], dtype=Type("bool"), case=_random)
    CASES.add(_op, "constant", [3], *((2.0, 0.0) if _op != "random_uniform" else (2.0, 2.0)))
CASES.add("random_normal", "int32", [2], dtype=Type("int32"), case=_random)
CASES.add("random_uniform", "int32", [2], maxval=5, dtype=Type("int32"), case=_random)
CASES.add("random_uniform", "int64", [2], maxval=5, dtype=Type("int64"), case=_random)
CASES.add("random_uniform", "int32 without maxval", [2], dtype=Type("int32"), case=_random)
CASES.add("random_uniform", "int32 of one", [3], 4, 5, dtype=Type("int32"))
CASES.add("random_shuffle", "one row", Fed([[1.0, 2.0]]))
CASES.add("random_shuffle", "unknown", Fed(M, shape=UNKNOWN), case=_random)
CASES.add("random_shuffle", "int64", Fed([1, 2, 3], "int64"), case=_random)
CASES.add("multinomial", "certain", Fed([[0.0, -1e9], [-1e9, 0.0]]), 3)
CASES.add("multinomial", "vector", Fed([0.0, 1.0]), 3, case=_random)
CASES.add("random_gamma", "shape", [2], Fed([1.0, 2.0, 3.0]), case=_random)
CASES.add("random_gamma", "beta", [2], Fed(1.0), Fed([1.0, 2.0]), case=_random)
CASES.add("random_crop", "whole", Fed(M), [2, 3])
CASES.add("random_crop", "part", Fed(M), [1, 2], case=_random)
CASES.add("random_crop", "too large", Fed(M), [3, 3])

# -- variables -----------------------------------------------------------------------------------------------------

for _op in ("assign", "assign_add", "assign_sub"):
    CASES.add(_op, "literal", Var([1.0, 2.0]), [3.0, 4.0])
    CASES.add(_op, "whole literal", Var([1.0, 2.0]), [3, 4])
    CASES.add(_op, "tensor", Var([1.0, 2.0]), Fed([3.0, 4.0]))
    CASES.add(_op, "int64", Var([1, 2], "int64"), [3, 4])
    CASES.add(_op, "fraction for int32", Var([1, 2], "int32"), [3.5, 4.5])
    CASES.add(_op, "mixed", Var([1.0, 2.0]), Fed([3, 4], "int32"))
    CASES.add(_op, "other shape", Var([1.0, 2.0]), Fed([3.0]))
    CASES.add(_op, "scalar", Var([1.0, 2.0]), 3.0)
    CASES.add(_op, "named", Var(1.0), 2.0, name="mine")
for _kind in ("add", "sub", "update", "mul", "div", "min", "max"):
    _op = f"scatter_{_kind}"
    CASES.add(_op, "rows", Var(ROWS), Fed([2, 0], "int32"), Fed([[10.0, 10.0], [20.0, 20.0]]))
    CASES.add(_op, "literal", Var(ROWS), [2, 0], [[10.0, 10.0], [20.0, 20.0]])
    CASES.add(_op, "scalar index", Var(ROWS), Fed(1, "int32"), Fed([10.0, 10.0]))
    CASES.add(_op, "scalar update", Var(ROWS), Fed([1], "int32"), 10.0)
    CASES.add(_op, "int32", Var([1, 2], "int32"), Fed([0], "int32"), Fed([5], "int32"))
    CASES.add(_op, "mixed", Var(ROWS), Fed([0], "int32"), Fed([[5, 5]], "int32"))
    CASES.add(_op, "other shape", Var(ROWS), Fed([0], "int32"), Fed([[5.0, 5.0, 5.0]]))
    CASES.add(_op, "negative", Var(ROWS), Fed([-1], "int32"), Fed([[5.0, 5.0]]))
    CASES.add(_op, "beyond", Var(ROWS), Fed([3], "int32"), Fed([[5.0, 5.0]]))
    CASES.add(_op, "literal beyond", Var(ROWS), [3], [[5.0, 5.0]])
    CASES.add(_op, "empty", Var(ROWS), Fed([], "int32"), Fed(np.zeros([0, 2])))
    if _kind in ("add", "sub"):
        CASES.add(
            _op, "twice the same", Var(ROWS), Fed([1, 1], "int32"), Fed([[1.0, 1.0], [2.0, 2.0]])
        )
CASES.add("is_variable_initialized", "initialised", Var(1.0))

# -- rows from their end on ----------------------------------------------------------------------------------------

for _label, _lengths in (("int32", "int32"), ("int64", "int64")):
    CASES.add(
        "reverse_sequence", _label, Fed(np.arange(12.0).reshape(3, 4)), Fed([1, 4, 0], _lengths), 1
    )
CASES.add(
    "reverse_sequence",
    "literal",
    Fed([[1, 2, 3], [4, 5, 6]], "int32"),
    [2, 3],
    seq_dim=1,
    batch_dim=0,
)
CASES.add("reverse_sequence", "other axes", Fed(CUBE), [1, 2, 0, 2], seq_axis=0, batch_axis=2)
CASES.add("reverse_sequence", "slope", Fed(M), [2, 3], 1, case={"slopes": True})
CASES.add(
    "reverse_sequence",
    "unknown",
    Fed(M, shape=[None, None]),
    Fed([2, 3], "int32", shape=[None]),
    seq_axis=1,
)
CASES.add("reverse_sequence", "too few lengths", Fed(M), [2], 1)
CASES.add("reverse_sequence", "one axis", Fed(M), [2, 2, 2], 1, 1)
