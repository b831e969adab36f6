"""Cases of arithmetic: element by element, comparisons, reductions, types, matrices."""

from __future__ import annotations

import numpy as np

from tests.harness.tf1.oracle.case import Call, Const, Fed, Np, Table, Type, Var

CASES = Table()
NAN, INF = np.nan, np.inf

# -- one argument --------------------------------------------------------------------------------------------------

EDGES = [-2.5, -1.0, -0.5, -0.0, 0.0, 0.3, 0.5, 1.0, 1.5, 2.5, INF, -INF, NAN]
SMALL = [-2.5, -1.0, -0.5, 0.3, 0.5, 1.0, 1.5]
WHOLE = {
    "int32": [-7, -1, 0, 1, 7, 2**31 - 1, -(2**31)],
    "int64": [-7, -1, 0, 1, 7, 2**40, -(2**63)],
    "int8": [-128, -7, 0, 7, 127],
    "uint8": [0, 1, 7, 200, 255],
}
COMPLEX = [1 + 2j, -0.5 + 0.25j, 2j, -3.0]
UNARY = """abs acos asin atan ceil conj cos cosh digamma erf erfc exp expm1 floor is_finite is_inf is_nan lgamma log
log1p negative reciprocal rint round rsqrt sigmoid sign sin sinh sqrt square tan tanh""".split()
OLD_UNARY = {"inv": "reciprocal", "neg": "negative", "complex_abs": "abs"}
SPECIAL = {"digamma", "lgamma", "erf", "erfc"}

for _op in UNARY:
    _more = {"ulps": 64 if _op in SPECIAL else 8}
    CASES.add(_op, "float32", Fed(EDGES), case=_more)
    if _op in "abs exp log sqrt tanh sigmoid negative square sin floor reciprocal".split():
        CASES.add(_op, "float64", Fed(SMALL, "float64"), case=_more)
        CASES.add(_op, "float16", Fed(SMALL, "float16"), case={"ulps": 4})
    CASES.add(_op, "int32", Fed(WHOLE["int32"], "int32"), case=_more)
    CASES.add(_op, "complex64", Fed(COMPLEX, "complex64"), case=_more)
    CASES.add(_op, "bool", Fed([True, False], "bool"))
    if not _op.startswith("is_"):
        CASES.add(_op, "slope", Fed([0.25, 0.5, 0.75]), case={"slopes": True, **_more})
for _op in "abs sign negative square".split():
    for _dtype in ("int64", "int8"):
        CASES.add(_op, _dtype, Fed(WHOLE[_dtype], _dtype))
for _op, _new in OLD_UNARY.items():
    _x = Fed(SMALL) if _op != "complex_abs" else Fed(COMPLEX, "complex64")
    CASES.add(_op, "old name", _x, asked=Call(_new, (_x,)))
for _op in ("abs", "sigmoid", "tanh", "exp"):
    CASES.add(_op, "empty", Fed(np.zeros([0, 3])))
    CASES.add(_op, "scalar", Fed(0.5))
    CASES.add(_op, "literal", [0.5, -0.5])
    CASES.add(_op, "unknown rank", Fed([0.5, 1.0], shape=None))
    CASES.add(_op, "unknown size", Fed([[0.5, 1.0]], shape=[None, 2]))
    CASES.add(_op, "named", Fed(0.5), name="mine")
    CASES.add(_op, "variable", Var([0.5, 1.0]))
    CASES.add(_op, "string", Const(["a"], "string"))
CASES.add("logical_not", "bool", Fed([True, False], "bool"))
CASES.add("logical_not", "int32", Fed([1, 0], "int32"))
CASES.add("logical_not", "float32", Fed([1.0, 0.0]))
CASES.add("round", "half", Fed([0.5, 1.5, 2.5, -0.5, -1.5, 3.5]))
CASES.add("rint", "half", Fed([0.5, 1.5, 2.5, -0.5, -1.5, 3.5]))
for _op in ("real", "imag"):
    CASES.add(_op, "complex64", Fed(COMPLEX, "complex64"))
    CASES.add(_op, "complex128", Fed(COMPLEX, "complex128"))
    CASES.add(_op, "float32", Fed([1.0, -2.0]))
CASES.add("complex", "float32", Fed([1.0, -2.0]), Fed([0.5, 3.0]))
CASES.add("complex", "float64", Fed([1.0, -2.0], "float64"), Fed([0.5, 3.0], "float64"))
CASES.add("complex", "broadcast", Fed([1.0, -2.0]), Fed(0.5))
CASES.add("complex", "int32", Fed([1, 2], "int32"), Fed([1, 2], "int32"))
CASES.add("complex", "mixed", Fed([1.0]), Fed([1.0], "float64"))

# -- two arguments -------------------------------------------------------------------------------------------------

BINARY = """add atan2 div divide equal floordiv floormod greater greater_equal less less_equal maximum minimum mod
multiply not_equal pow squared_difference subtract truediv realdiv truncatediv truncatemod""".split()
OLD_BINARY = {"mul": "multiply", "sub": "subtract"}
X, Y = (
    [7.0, -7.0, 7.0, -7.0, 0.0, 2.5, NAN, 1.0, INF],
    [2.0, 2.0, -2.0, -2.0, 5.0, 2.5, 1.0, NAN, 2.0],
)
WHOLE_X, WHOLE_Y = [7, -7, 7, -7, 0, 6, 5], [2, 2, -2, -2, 5, 3, 5]
POW_Y = [2, 3, 0, 1, 5, 3, 4]
EVERY_DTYPE = "add multiply subtract div floordiv mod maximum equal less truediv".split()
DIVIDING = {
    "div",
    "divide",
    "floordiv",
    "floormod",
    "mod",
    "truediv",
    "truncatediv",
    "truncatemod",
    "realdiv",
}

for _op in BINARY:
    CASES.add(_op, "float32", Fed(X), Fed(Y))
    if _op in EVERY_DTYPE:
        CASES.add(_op, "float64", Fed(X[:6], "float64"), Fed(Y[:6], "float64"))
        CASES.add(_op, "float16", Fed(X[:6], "float16"), Fed(Y[:6], "float16"))
        CASES.add(_op, "int8", Fed([100, -100, -7], "int8"), Fed([100, 3, 2], "int8"))
        CASES.add(_op, "uint8", Fed([200, 3, 7], "uint8"), Fed([100, 5, 2], "uint8"))
        CASES.add(_op, "empty", Fed(np.zeros([0, 2])), Fed([1.0, 2.0]))
        CASES.add(_op, "two literals", [7, -7], 2)
    for _dtype in ("int32", "int64"):
        CASES.add(
            _op, _dtype, Fed(WHOLE_X, _dtype), Fed(POW_Y if _op == "pow" else WHOLE_Y, _dtype)
        )
    CASES.add(_op, "bool", Fed([True, False, True], "bool"), Fed([True, True, False], "bool"))
    CASES.add(_op, "complex64", Fed([1 + 2j, 2j], "complex64"), Fed([1 - 1j, 2.0], "complex64"))
    CASES.add(_op, "broadcast", Fed([[1.0], [2.0]]), Fed([3.0, 4.0, 5.0]))
    CASES.add(_op, "literal", Fed([5, -5], "int32"), 2)
    CASES.add(_op, "literal first", 2.0, Fed([5.0, -5.0]))
    CASES.add(_op, "fraction beside integers", Fed([5, -5], "int32"), 2.5)
    CASES.add(_op, "literal beside float64", Fed([5.0, -5.0], "float64"), 3)
    CASES.add(_op, "mixed", Fed([5, -5], "int32"), Fed([2.0, 3.0]))
    CASES.add(_op, "other shapes", Fed([1.0, 2.0]), Fed([1.0, 2.0, 3.0]))
for _op in OLD_BINARY:
    CASES.add(
        _op,
        "old name",
        Fed([1.0, 2.0]),
        Fed([3.0, 4.0]),
        asked=Call(OLD_BINARY[_op], (Fed([1.0, 2.0]), Fed([3.0, 4.0]))),
    )
for _op in sorted(DIVIDING - {"realdiv", "divide"}):
    CASES.add(_op, "by zero", Fed([7, -7], "int32"), Fed([0, 2], "int32"))
    CASES.add(_op, "by zero of float32", Fed([7.0, -7.0, 0.0]), Fed([0.0, 0.0, 0.0]))
    CASES.add(_op, "large", Fed([16777217, -16777217], "int32"), Fed([1, 1], "int32"))
for _op in "add atan2 div floordiv floormod maximum minimum multiply pow squared_difference subtract truediv".split():
    CASES.add(_op, "slope", Fed([5.5, 2.0, 1.0]), Fed([2.0, 2.0, 3.0]), case={"slopes": True})
    CASES.add(
        _op, "slope of broadcast", Fed([[5.5], [2.0]]), Fed([1.5, 2.0]), case={"slopes": True}
    )
CASES.add("pow", "negative exponent", Fed([2, 3], "int32"), Fed([-1, 2], "int32"))
CASES.add("pow", "slope at zero", Fed([0.0, 2.0]), Const([2.0, 0.0]), case={"slopes": True})
CASES.add("atan2", "signs", Fed([0.0, -0.0, 1.0, -1.0]), Fed([-1.0, -1.0, 0.0, -0.0]))
for _op in ("logical_and", "logical_or", "logical_xor"):
    CASES.add(
        _op,
        "bool",
        Fed([True, True, False, False], "bool"),
        Fed([True, False, True, False], "bool"),
    )
    CASES.add(_op, "broadcast", Fed([[True], [False]], "bool"), Fed([True, False], "bool"))
    CASES.add(_op, "literal", Fed([True, False], "bool"), True)
    CASES.add(_op, "int32", Fed([1, 0], "int32"), Fed([1, 1], "int32"))
    CASES.add(_op, "other shapes", Fed([True, False], "bool"), Fed([True] * 3, "bool"))
CASES.add("scalar_mul", "float32", 2.0, Fed([1.0, 2.0]))
CASES.add("scalar_mul", "tensor", Fed(2.0), Fed([1.0, 2.0]))
CASES.add("scalar_mul", "vector", Fed([2.0, 3.0]), Fed([1.0, 2.0]))
CASES.add("equal", "strings", Const(["a", "b"], "string"), Const(["a", "c"], "string"))

OPERATORS = "add sub mul truediv floordiv mod pow lt le gt ge".split()
for _op in OPERATORS:
    CASES.add(f"@{_op}", "float32", Fed([7.0, -7.0, 0.5]), Fed([2.0, 2.0, -2.0]))
    CASES.add(f"@{_op}", "int32", Fed([7, -7, 7], "int32"), Fed([2, 2, 3], "int32"))
    CASES.add(f"@{_op}", "literal", Fed([7, -7, 7], "int32"), 2)
    CASES.add(f"@{_op}", "reflected", 2, Fed([7.0, -7.0, 7.0]))
    CASES.add(f"@{_op}", "fraction beside integers", Fed([7, -7, 7], "int32"), 2.5)
    CASES.add(f"@{_op}", "numpy float64", Fed([7.0, -7.0]), Np([2.0, 3.0], "float64"))
    CASES.add(f"@{_op}", "mixed", Fed([5, -5], "int32"), Fed([2.0, 3.0]))
    if _op in ("add", "lt"):
        CASES.add(f"@{_op}", "variable", Var([7.0, -7.0]), 2.0)
for _op in ("and_", "or_", "xor"):
    CASES.add(
        f"@{_op}", "bool", Fed([True, True, False], "bool"), Fed([True, False, False], "bool")
    )
CASES.add("@neg", "int32", Fed([7, -7], "int32"))
CASES.add("@abs", "float32", Fed([7.0, -7.0]))
CASES.add("@invert", "bool", Fed([True, False], "bool"))
CASES.add("@matmul", "float32", Fed([[1.0, 2.0]]), Fed([[3.0], [4.0]]))

# -- reductions ----------------------------------------------------------------------------------------------------

MATRIX = [[1.0, -2.0, 3.0], [4.0, 0.5, -6.0]]
NUMBERS = "sum mean prod max min".split()
for _kind in [*NUMBERS, "logsumexp", "all", "any"]:
    _op, _dtype = f"reduce_{_kind}", "bool" if _kind in ("all", "any") else "float32"
    _m = [[True, False, True], [True, True, True]] if _dtype == "bool" else MATRIX
    CASES.add(_op, "all axes", Fed(_m, _dtype))
    CASES.add(_op, "axis 0", Fed(_m, _dtype), 0)
    CASES.add(_op, "axis -1", Fed(_m, _dtype), -1)
    CASES.add(_op, "axis list", Fed(_m, _dtype), [0, 1])
    CASES.add(_op, "no axes", Fed(_m, _dtype), [])
    if _kind in ("sum", "all"):
        CASES.add(_op, "axis tensor", Fed(_m, _dtype), Const(1, "int32"))
        CASES.add(_op, "axis array", Fed(_m, _dtype), Np([0], "int64"))
        CASES.add(_op, "axis tuple", Fed(_m, _dtype), (1,))
        CASES.add(_op, "keep_dims of all", Fed(_m, _dtype), keep_dims=True)
        CASES.add(_op, "reduction_indices", Fed(_m, _dtype), reduction_indices=[1])
    CASES.add(_op, "keepdims", Fed(_m, _dtype), 1, keepdims=True)
    CASES.add(_op, "keep_dims", Fed(_m, _dtype), 1, keep_dims=True)
    CASES.add(_op, "both keywords", Fed(_m, _dtype), axis=0, reduction_indices=1)
    CASES.add(_op, "axis twice", Fed(_m, _dtype), [0, 0])
    CASES.add(_op, "axis twice from both ends", Fed(_m, _dtype), [1, -1])
    CASES.add(_op, "axis beyond", Fed(_m, _dtype), 2)
    CASES.add(_op, "axis below", Fed(_m, _dtype), -3)
    CASES.add(_op, "empty", Fed(np.zeros([0, 3]), _dtype))
    CASES.add(_op, "empty rows", Fed(np.zeros([2, 0]), _dtype), 1)
    CASES.add(_op, "scalar", Fed(_m[0][0], _dtype))
    CASES.add(_op, "unknown rows", Fed(_m, _dtype, [None, 3]), 0)
    CASES.add(_op, "unknown columns", Fed(_m, _dtype, [2, None]), 0)
    CASES.add(_op, "named", Fed(_m, _dtype), name="mine")
    CASES.add(_op, "int32", Fed([-1, -2], "int32"))
    if _dtype != "bool":
        CASES.add(_op, "bool", Fed([True, False], "bool"))
        CASES.add(_op, "nan", Fed([1.0, NAN, 2.0]))
        CASES.add(_op, "infinity", Fed([INF, 1.0, -INF]))
        CASES.add(_op, "slope", Fed([1.0, 3.0, 3.0, 2.0]), case={"slopes": True})
    if _kind in NUMBERS:
        CASES.add(_op, "int64", Fed([[-1, -2], [3, -4], [2, 3]], "int64"), 1)
        CASES.add(_op, "uint8", Fed([200, 100, 51], "uint8"))
        CASES.add(_op, "int8", Fed([100, 100, 51], "int8"))
        CASES.add(_op, "float16", Fed([1.5, 2.5, 4.0], "float16"))
        CASES.add(_op, "float64", Fed([1.5, 2.5, 4.0], "float64"))
        CASES.add(_op, "complex64", Fed([1 + 2j, 2j], "complex64"))
CASES.add("reduce_mean", "overflow", Fed([2**31 - 1, 2**31 - 1, 2], "int32"))
CASES.add("reduce_prod", "slope with zero", Fed([0.0, 2.0, 3.0]), case={"slopes": True})
CASES.add("reduce_min", "slope of ties", Fed([1.0, 1.0, 3.0]), case={"slopes": True})
CASES.add("reduce_logsumexp", "large", Fed([1000.0, 1000.0]))
CASES.add("reduce_logsumexp", "all minus infinity", Fed([-INF, -INF]))

for _op in ("argmax", "argmin"):
    CASES.add(_op, "axis 0", Fed([[1.0, 3.0], [1.0, 5.0]]), 0)
    CASES.add(_op, "axis 1", Fed([[1.0, 3.0], [5.0, 5.0]]), 1)
    CASES.add(_op, "axis -1", Fed([[1.0, 3.0], [5.0, 5.0]]), axis=-1)
    CASES.add(_op, "default axis", Fed([[1.0, 3.0], [5.0, 5.0]]))
    CASES.add(_op, "dimension", Fed([[1.0, 3.0], [5.0, 5.0]]), dimension=1)
    CASES.add(_op, "int32 out", Fed([1.0, 3.0]), 0, output_type=Type("int32"))
    CASES.add(_op, "int32", Fed([4, 4, 1], "int32"), 0)
    CASES.add(_op, "uint8", Fed([4, 200, 1], "uint8"), 0)
    CASES.add(_op, "bool", Fed([False, True, True], "bool"), 0)
    CASES.add(_op, "nan", Fed([1.0, NAN, 2.0]), 0)
    CASES.add(_op, "axis beyond", Fed([[1.0, 3.0]]), 2)
    CASES.add(_op, "empty", Fed(np.zeros([0, 3])), 0)
    CASES.add(_op, "unknown", Fed([[1.0, 3.0]], shape=[None, 2]), 1)
    CASES.add(_op, "scalar", Fed(1.0), 0)
CASES.add("arg_max", "axis", Fed([[1.0, 3.0], [5.0, 5.0]]), 1)
CASES.add("arg_min", "axis", Fed([[1.0, 3.0], [5.0, 5.0]]), 1)

for _op in ("cumsum", "cumprod"):
    for _label, _more in {
        "plain": {},
        "exclusive": {"exclusive": True},
        "reverse": {"reverse": True},
        "exclusive and reverse": {"exclusive": True, "reverse": True},
        "axis": {"axis": 1},
        "axis -1": {"axis": -1},
    }.items():
        CASES.add(_op, _label, Fed([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), **_more)
    CASES.add(_op, "int8", Fed([100, 100], "int8"))
    CASES.add(_op, "int64", Fed([2**33, 3], "int64"))
    CASES.add(_op, "bool", Fed([True, True], "bool"))
    CASES.add(_op, "empty", Fed(np.zeros([0])))
    CASES.add(_op, "empty exclusive", Fed(np.zeros([0, 2])), exclusive=True)
    CASES.add(_op, "scalar", Fed(1.0))
    CASES.add(_op, "axis beyond", Fed([1.0, 2.0]), 1)
    CASES.add(_op, "nan", Fed([1.0, NAN, 2.0]), exclusive=True)
    CASES.add(_op, "unknown", Fed([[1.0, 3.0]], shape=[None, 2]), 1)
    CASES.add(_op, "slope", Fed([2.0, 3.0, 4.0]), case={"slopes": True})

# -- types ---------------------------------------------------------------------------------------------------------

FROM = {
    "float32": [1.7, -1.7, 0.0, 200.5],
    "float64": [1.7, -1.7, 0.0, 200.5],
    "int32": [1, -1, 0, 300, 70000],
    "int64": [2**32 + 5, -1, 0, 3],
    "uint8": [0, 1, 200, 255],
    "bool": [True, False],
    "float16": [1.5, -1.5, 0.0],
    "bfloat16": [1.5, -1.5, 0.0],
    "complex64": [1 + 2j, 0j],
}
INTO = "float32 float64 float16 bfloat16 int32 int64 int8 bool complex64".split()
for _from, _values in FROM.items():
    for _into in INTO:
        # beyond the range C++ has no answer
        if not (_into == "int8" and _from in ("float32", "float64")):
            CASES.add("cast", f"{_from} to {_into}", Fed(_values, _from), Type(_into))
CASES.add("cast", "by name", Fed([1.7]), "int32")
CASES.add("cast", "to float by name", Fed([1.7], "float64"), "float")
CASES.add("cast", "to Python's float", Fed([1], "int32"), float)
CASES.add("cast", "to Python's bool", Fed([1, 0], "int32"), bool)
CASES.add("cast", "to nonsense", Fed([1]), "banana")
CASES.add("cast", "literal", [1.7, 2.2], Type("int32"))
CASES.add("cast", "string", Const(["1"], "string"), Type("float32"))
CASES.add("cast", "variable", Var([1.7]), Type("int32"))
for _name in ("bfloat16", "double", "float", "int32", "int64"):
    CASES.add(f"to_{_name}", "float32", Fed([1.5, -2.5]))
    CASES.add(f"to_{_name}", "int32", Fed([1, -2], "int32"))
    CASES.add(f"to_{_name}", "bool", Fed([True, False], "bool"))
for _from, _into, _values in (
    ("int32", "int64", [1, -2]),
    ("int32", "uint8", [1, -2, 300]),
    ("float32", "int32", [1.7, -2.7, 3e10, -3e10]),
    ("float32", "uint8", [1.7, -2.7, 300.0]),
    ("int64", "int32", [2**40, -(2**40), 5]),
    ("uint8", "int8", [1, 200]),
    ("int8", "uint16", [1, -100]),
    ("int32", "float32", [1, -100]),
    ("float64", "float32", [1e300, -1.0]),
    ("float32", "float16", [1e6, -1e6, 1.0]),
    ("float32", "int8", [127.6, -128.9, 3.2]),
    ("int64", "uint8", [-1, 256]),
):
    CASES.add("saturate_cast", f"{_from} to {_into}", Fed(_values, _from), Type(_into))
CASES.add("bitcast", "float32 to int32", Fed([1.0, -0.0], "float32"), Type("int32"))
CASES.add("bitcast", "int32 to uint8", Fed([258, -1], "int32"), Type("uint8"))
CASES.add("bitcast", "uint8 to int32", Fed([[1, 2, 0, 0]], "uint8"), Type("int32"))
CASES.add("bitcast", "uint8 to int32 that does not fit", Fed([[1, 2, 0]], "uint8"), Type("int32"))

# -- matrices ------------------------------------------------------------------------------------------------------

A, B = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], [[1.0, -1.0], [0.5, 2.0], [3.0, 1.0]]
CASES.add("matmul", "float32", Fed(A), Fed(B))
CASES.add("matmul", "float64", Fed(A, "float64"), Fed(B, "float64"))
CASES.add("matmul", "float16", Fed(A, "float16"), Fed(B, "float16"))
CASES.add("matmul", "int32", Fed(WHOLE_M := [[1, 2], [3, -4]], "int32"), Fed(WHOLE_M, "int32"))
CASES.add("matmul", "complex64", Fed([[1 + 1j]], "complex64"), Fed([[2j]], "complex64"))
CASES.add("matmul", "transposed", Fed(A), Fed(A), transpose_b=True)
CASES.add("matmul", "transposed first", Fed(A), Fed(A), transpose_a=True)
CASES.add(
    "matmul",
    "adjoint",
    Fed([[1j, 2.0]], "complex64"),
    Fed([[1j, 2.0]], "complex64"),
    adjoint_b=True,
)
CASES.add("matmul", "transposed and adjoint", Fed(A), Fed(B), transpose_a=True, adjoint_a=True)
CASES.add("matmul", "batch", Fed([A, A]), Fed([B, B]))
CASES.add("matmul", "batch broadcast", Fed([A, A]), Fed(B))
CASES.add("matmul", "vector", Fed([1.0, 2.0]), Fed([[1.0], [2.0]]))
CASES.add("matmul", "other sizes", Fed(A), Fed(A))
CASES.add("matmul", "mixed", Fed([[1.0]]), Fed([[1.0]], "float64"))
CASES.add("matmul", "literal", Fed(A), B)
CASES.add("matmul", "empty", Fed(np.zeros([2, 0])), Fed(np.zeros([0, 3])))
CASES.add("matmul", "unknown rows", Fed(A, shape=[None, 3]), Fed(B))
CASES.add("matmul", "slope", Fed(A), Fed(B), case={"slopes": True})
CASES.add(
    "batch_matmul",
    "adjoint",
    Fed([A]),
    Fed([A]),
    adj_y=True,
    asked=Call("matmul", (Fed([A]), Fed([A])), {"adjoint_b": True}),
)
CASES.add("tensordot", "number", Fed(A), Fed(B), 1)
CASES.add("tensordot", "zero", Fed([1.0, 2.0]), Fed([3.0, 4.0]), 0)
CASES.add("tensordot", "pairs", Fed(A), Fed(A), [[0, 1], [0, 1]])
CASES.add("tensordot", "negative", Fed(A), Fed(B), [[-1], [0]])
CASES.add("tensordot", "other sizes", Fed(A), Fed(A), 1)
for _label, _equation in {
    "product": "ij,jk->ik",
    "trace of product": "ij,ji->",
    "outer": "ij,kl->ijkl",
    "implicit": "ij,jk",
}.items():
    CASES.add("einsum", _label, _equation, Fed(A), Fed(B))
CASES.add("einsum", "transpose", "ij->ji", Fed(A))
CASES.add("einsum", "wrong", "ij,jk->ik", Fed(A), Fed(A))
for _op in ("add_n", "accumulate_n"):
    CASES.add(_op, "float32", [Fed([1.0, 2.0]), Fed([3.0, 4.0]), Fed([5.0, 6.0])])
    CASES.add(_op, "one", [Fed([1.0, 2.0])])
    CASES.add(_op, "none", [])
    CASES.add(_op, "mixed", [Fed([1.0, 2.0]), Fed([3, 4], "int32")])
    CASES.add(_op, "other shapes", [Fed([1.0, 2.0]), Fed([3.0])])
    CASES.add(_op, "slope", [Fed([1.0, 2.0]), Fed([3.0, 4.0])], case={"slopes": True})
CASES.add("cross", "float32", Fed([1.0, 2.0, 3.0]), Fed([0.0, 1.0, -1.0]))
CASES.add("cross", "rows", Fed([[1.0, 2.0, 3.0]]), Fed([[0.0, 1.0, -1.0]]))
CASES.add("cross", "two elements", Fed([1.0, 2.0]), Fed([0.0, 1.0]))
CASES.add("trace", "float32", Fed([[1.0, 2.0], [3.0, 4.0]]))
CASES.add("trace", "batch", Fed([[[1.0, 2.0], [3.0, 4.0]]]))
CASES.add("trace", "not square", Fed(A))
for _label, _args, _kw in (
    ("all", (), {}),
    ("keepdims", (), {"keepdims": True}),
    ("axis", (), {"axis": 1}),
    ("axis in a list", (), {"axis": [1]}),
    ("keep_dims of an axis", (), {"axis": 1, "keep_dims": True}),
    ("one", (1,), {}),
    ("one of axes", (1,), {"axis": [0, 1]}),
    ("infinity", (np.inf,), {}),
    ("infinity of axes", (np.inf,), {"axis": (0, 1)}),
    ("fro", ("fro",), {"axis": [0, 1]}),
    ("fro of a vector", ("fro",), {}),
    ("three", (3,), {}),
    ("zero", (0,), {}),
    ("banana", ("banana",), {}),
    ("euclidean of axes", (), {"axis": (0, 1)}),
):
    CASES.add("norm", _label, Fed(A), *_args, **_kw)
CASES.add("norm", "slope", Fed([3.0, 4.0]), case={"slopes": True})
CASES.add("norm", "complex64", Fed([3 + 4j, 0j], "complex64"))
CASES.add("norm", "int32", Fed([3, 4], "int32"))

for _op, _ids, _n in (("unsorted_segment_sum", [0, 2, 0], 3),):
    _rows = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    CASES.add(_op, "rows", Fed(_rows), Fed(_ids, "int32"), _n)
    CASES.add(_op, "int64 ids", Fed(_rows), Fed(_ids, "int64"), _n)
    CASES.add(_op, "literal ids", Fed(_rows), _ids, _n)
    CASES.add(_op, "ids of matrix", Fed(_rows), Fed([[0, 1], [1, 0], [2, 2]], "int32"), _n)
    CASES.add(_op, "int32", Fed([1, 2, 3], "int32"), Fed(_ids, "int32"), _n)
    CASES.add(_op, "negative is dropped", Fed(_rows), Fed([0, -1, 0], "int32"), _n)
    CASES.add(_op, "literal beyond", Fed(_rows), [0, 3, 0], _n)
    CASES.add(_op, "empty", Fed(np.zeros([0, 2])), Fed(np.zeros([0]), "int32"), _n)
    CASES.add(_op, "other sizes", Fed(_rows), Fed([0, 1], "int32"), _n)
    CASES.add(_op, "slope", Fed(_rows), Fed(_ids, "int32"), _n, case={"slopes": True})
    CASES.add(_op, "beyond", Fed(_rows), Fed([0, 3, 0], "int32"), _n)

# -- counting ------------------------------------------------------------------------------------------------------

ZEROS = [[0.0, 1.0, NAN], [0.0, -2.0, 0.0]]
CASES.add("count_nonzero", "all", Fed(ZEROS))
CASES.add("count_nonzero", "axis", Fed(ZEROS), 1)
CASES.add("count_nonzero", "kept", Fed(ZEROS), axis=0, keep_dims=True)
CASES.add("count_nonzero", "bool as int32", Fed([True, False, True], "bool"), dtype=Type("int32"))
CASES.add("count_nonzero", "int32", Fed([0, 5, 0], "int32"))
CASES.add("count_nonzero", "unknown", Fed(ZEROS, shape=[None, 3]), [1])
CASES.add("count_nonzero", "empty", Fed(np.zeros([0, 2])), 0)
for _label, _labels, _found in (
    ("literal", [0, 2, 1], [0, 1, 1]),
    ("column", [[0], [1]], [[1], [1]]),
):
    CASES.add("confusion_matrix", _label, _labels, _found)
CASES.add("confusion_matrix", "computed", Fed([0, 1, 1], "int32"), Fed([0, 1, 0], "int32"), 3)
CASES.add(
    "confusion_matrix",
    "int64",
    Fed([0, 1, 1], "int64"),
    Fed([0, 1, 0], "int64"),
    2,
    dtype=Type("float32"),
)
CASES.add(
    "confusion_matrix",
    "weighted",
    Fed([0, 1, 1], "int32"),
    Fed([0, 1, 1], "int32"),
    2,
    weights=[2, 3, 4],
)
CASES.add("confusion_matrix", "no class", Fed([0, 3], "int32"), Fed([0, 1], "int32"), 2)
CASES.add("confusion_matrix", "below", Fed([0, 1], "int32"), Fed([0, -1], "int32"), 2)
for _label, _values in (("finite", [1.0, 2.0]), ("NaN", [1.0, NAN]), ("infinite", [INF])):
    CASES.add("verify_tensor_all_finite", _label, Fed(_values), "must be finite")
CASES.add("assert_rank", "right", Fed([1.0, 2.0]), 1)
CASES.add("assert_rank", "wrong", Fed([1.0, 2.0]), 2)
CASES.add("assert_rank", "right in the step", Fed([1.0, 2.0], shape=None), 1)
CASES.add("assert_rank", "wrong in the step", Fed([1.0, 2.0], shape=None), 2)
