"""Cases of ``tf.nn``, of learning rates and of initial values."""

from __future__ import annotations

import numpy as np

from tests.harness.tf1.oracle.case import Call, Const, Fed, Np, Table, Type, Var

CASES = Table()
NAN, INF = np.nan, np.inf
AROUND = [-3.0, -1.0, -0.0, 0.0, 0.5, 1.0, 6.0, 7.0]
LOGITS = [[1.0, 2.0, 3.0], [3.0, 1.0, 0.0]]

# -- activations ---------------------------------------------------------------------------------------------------

for _name in "relu relu6 elu selu softplus softsign swish sigmoid tanh leaky_relu l2_loss zero_fraction".split():
    _op = f"nn.{_name}"
    CASES.add(_op, "float32", Fed(AROUND))
    CASES.add(_op, "float64", Fed(AROUND, "float64"))
    CASES.add(_op, "float16", Fed(AROUND, "float16"), case={"ulps": 4})
    CASES.add(_op, "not finite", Fed([NAN, INF, -INF] if _name != "l2_loss" else [NAN]))
    CASES.add(_op, "int32", Fed([-1, 0, 7], "int32"))
    CASES.add(_op, "literal", [-1.0, 2.0])
    if _name != "swish":
        CASES.add(_op, "named", Fed(AROUND), name="mine")
    CASES.add(_op, "empty", Fed(np.zeros([0])))
    CASES.add(_op, "unknown", Fed([[1.0]], shape=[None, 1]))
    if _name != "zero_fraction":
        CASES.add(
            _op,
            "slope",
            Fed([-3.0, -1.0, 0.0, 0.5, 1.0, 6.0, 7.0]),
            case={"slopes": True, "ulps": 64},
        )
CASES.add("nn.leaky_relu", "alpha", Fed(AROUND), 0.01)
for _name in ("softmax", "log_softmax"):
    _op = f"nn.{_name}"
    CASES.add(_op, "float32", Fed(LOGITS))
    CASES.add(_op, "float64", Fed(LOGITS, "float64"))
    CASES.add(_op, "axis 0", Fed(LOGITS), axis=0)
    CASES.add(_op, "dim 0", Fed(LOGITS), dim=0)
    CASES.add(_op, "vector", Fed([1.0, 2.0]))
    CASES.add(_op, "cube", Fed(np.arange(8.0).reshape(2, 2, 2)), axis=1)
    CASES.add(_op, "large", Fed([1000.0, 1000.0, -1000.0]))
    CASES.add(_op, "infinite", Fed([INF, 1.0]))
    CASES.add(_op, "minus infinity", Fed([-INF, 1.0]))
    CASES.add(_op, "nan", Fed([NAN, 1.0]))
    CASES.add(_op, "int32", Fed([1, 2], "int32"))
    CASES.add(_op, "scalar", Fed(1.0))
    CASES.add(_op, "axis beyond", Fed(LOGITS), axis=2)
    CASES.add(_op, "empty", Fed(np.zeros([0, 3])))
    CASES.add(_op, "unknown", Fed(LOGITS, shape=[None, 3]))
    CASES.add(_op, "named", Fed(LOGITS), name="mine")
    CASES.add(_op, "both keywords", Fed(LOGITS), dim=0, axis=1)
CASES.add("nn.log_softmax", "slope", Fed(LOGITS), case={"slopes": True})

# -- layers --------------------------------------------------------------------------------------------------------

_X, _W, _B = [[1.0, -2.0], [3.0, 4.0]], [[1.0, 0.0, -1.0], [2.0, 1.0, 1.0]], [0.5, -0.5, 1.0]
for _name in ("xw_plus_b", "relu_layer"):
    CASES.add(f"nn.{_name}", "float32", Fed(_X), Fed(_W), Fed(_B))
    CASES.add(f"nn.{_name}", "other sizes", Fed(_X), Fed(_W), Fed([1.0]))
    CASES.add(f"nn.{_name}", "slope", Fed(_X), Fed(_W), Fed(_B), case={"slopes": True})
CASES.add("nn.bias_add", "matrix", Fed(_W), Fed(_B))
CASES.add("nn.bias_add", "int32", Fed([[1, 2]], "int32"), Fed([3, 4], "int32"))
CASES.add("nn.bias_add", "NCHW", Fed(np.zeros([1, 2, 2, 2])), Fed([1.0, 2.0]), data_format="NCHW")
CASES.add("nn.bias_add", "other size", Fed(_W), Fed([1.0, 2.0]))
CASES.add("nn.bias_add", "size one", Fed(_W), Fed([1.0]))
CASES.add("nn.bias_add", "matrix bias", Fed(_W), Fed(_W))
CASES.add("nn.bias_add", "vector", Fed([1.0, 2.0]), Fed([1.0, 2.0]))
CASES.add("nn.bias_add", "banana", Fed(_W), Fed(_B), data_format="banana")
CASES.add("nn.bias_add", "mixed", Fed(_W), Fed([1, 2, 3], "int32"))
for _label, _x, _args in (
    ("axis 0", _X, (0,)),
    ("axis 1", _X, (1,)),
    ("axis list", _X, ([0, 1],)),
    ("zeros", [0.0, 0.0], (0,)),
    ("epsilon", [1e-3, 0.0], (0, 1e-2)),
):
    CASES.add("nn.l2_normalize", _label, Fed(_x), *_args)
    CASES.add("nn.l2_normalize", f"slope {_label}", Fed(_x), *_args, case={"slopes": True})
CASES.add("nn.l2_normalize", "axis keyword", Fed(_X), axis=1)
for _label, _x, _axes, _kw in (
    ("axis 0", _W, [0], {}),
    ("both", _W, [0, 1], {}),
    ("keep_dims", _W, [0], {"keep_dims": True}),
    ("keepdims", _W, [0], {"keepdims": True}),
    ("number", _W, 1, {}),
    ("empty", np.zeros([0, 2]), [0], {}),
    ("nan", [[NAN, 1.0]], [1], {}),
    ("none", _W, [], {}),
    ("large", [[10000.0, 10001.0]], [1], {}),
):
    CASES.add("nn.moments", _label, Fed(_x), _axes, **_kw)
CASES.add("nn.moments", "float16", Fed(_W, "float16"), [0])
CASES.add("nn.moments", "int32", Fed([[1, 2]], "int32"), [1])
_norm = (Fed(_W), Fed([0.0, 1.0, -1.0]), Fed([1.0, 4.0, 0.25]))
CASES.add(
    "nn.batch_normalization", "both", *_norm, Fed([1.0, 2.0, 3.0]), Fed([0.5, 1.0, 2.0]), 1e-3
)
CASES.add("nn.batch_normalization", "no offset", *_norm, None, Fed([0.5, 1.0, 2.0]), 1e-3)
CASES.add("nn.batch_normalization", "no scale", *_norm, Fed([0.5, 1.0, 2.0]), None, 1e-3)
CASES.add("nn.batch_normalization", "neither", *_norm, None, None, 1e-3)
_global = (*_norm, Fed([1.0, 2.0, 3.0]), Fed([0.5, 1.0, 2.0]), 1e-3)
CASES.add("nn.batch_norm_with_global_normalization", "scaled", *_global, True)
CASES.add("nn.batch_norm_with_global_normalization", "not scaled", *_global, False, name="norm")
for _op in ("nn.dropout",):
    CASES.add(_op, "keep all", Fed(_X), 1.0)
    CASES.add(_op, "keep_prob", Fed(_X), 0.5, case={"values": False})
    CASES.add(_op, "fed keep_prob of one", Fed(_X), Fed(1.0))
    CASES.add(_op, "rate", Fed(_X), rate=0.0)
    CASES.add(_op, "keep_prob zero", Fed(_X), 0.0)
    CASES.add(_op, "keep_prob beyond", Fed(_X), 1.5)
    CASES.add(_op, "neither", Fed(_X))
    CASES.add(_op, "noise_shape", Fed(_X), 0.5, [2, 1], case={"values": False})
    CASES.add(_op, "int32", Fed([1, 2], "int32"), 0.5)
    CASES.add(_op, "named", Fed(_X), 0.5, name="mine", case={"values": False})

# -- losses --------------------------------------------------------------------------------------------------------

_xent = "nn.sparse_softmax_cross_entropy_with_logits"
for _label, _labels, _logits in (
    ("int32", Fed([2, 0], "int32"), Fed(LOGITS)),
    ("int64", Fed([2, 0], "int64"), Fed(LOGITS)),
    ("negative", Fed([2, -1], "int32"), Fed(LOGITS)),
    ("beyond", Fed([3, 0], "int32"), Fed(LOGITS)),
    ("literal", [2, 0], Fed(LOGITS)),
    ("literal beyond", [3, 0], Fed(LOGITS)),
    ("matrix labels", Fed([[2], [0]], "int32"), Fed(LOGITS)),
    ("too few labels", Fed([2], "int32"), Fed(LOGITS)),
    ("fractions", Fed([2.0, 0.0]), Fed(LOGITS)),
    ("cube", Fed([[0, 1]], "int32"), Fed([LOGITS])),
    ("uint8", Fed([2, 0], "uint8"), Fed(LOGITS)),
    ("float64", Fed([2, 0], "int32"), Fed(LOGITS, "float64")),
    ("float16", Fed([2, 0], "int32"), Fed(LOGITS, "float16")),
    ("int logits", Fed([2, 0], "int32"), Fed([[1, 2, 3], [4, 5, 6]], "int32")),
    ("unknown", Fed([2, 0], "int32", [None]), Fed(LOGITS, shape=[None, 3])),
    ("large", Fed([0, 1], "int32"), Fed([[1000.0, 0.0], [1000.0, 0.0]])),
    ("minus infinity", Fed([0], "int32"), Fed([[-INF, 0.0]])),
    ("nan", Fed([0], "int32"), Fed([[NAN, 0.0]])),
    ("scalar", Fed(1, "int32"), Fed([1.0, 2.0])),
):
    CASES.add(_xent, _label, labels=_labels, logits=_logits)
CASES.add(_xent, "slope", labels=Fed([2, 0], "int32"), logits=Fed(LOGITS), case={"slopes": True})
CASES.add(
    _xent,
    "old order",
    Fed(LOGITS),
    Fed([2, 0], "int32"),
    asked=Call(_xent, (), {"labels": Fed([2, 0], "int32"), "logits": Fed(LOGITS)}),
)
CASES.add(_xent, "no labels", logits=Fed(LOGITS))
for _version in ("", "_v2"):
    _xent = f"nn.softmax_cross_entropy_with_logits{_version}"
    _soft = [[0.2, 0.3, 0.5], [1.0, 0.0, 0.0]]
    CASES.add(_xent, "distribution", labels=Fed(_soft), logits=Fed(LOGITS))
    CASES.add(
        _xent,
        "no distribution",
        labels=Fed([[2.0, 0.0, 1.0], [0.0, 0.0, 0.0]]),
        logits=Fed(LOGITS),
        case={"slopes": True},
    )
    CASES.add(_xent, "dim 0", labels=Fed(_soft), logits=Fed(LOGITS), dim=0)
    CASES.add(_xent, "axis 0", labels=Fed(_soft), logits=Fed(LOGITS), axis=0)
    CASES.add(_xent, "broadcast", labels=Fed([[0.2, 0.3, 0.5]]), logits=Fed(LOGITS))
    CASES.add(_xent, "other sizes", labels=Fed([[0.2, 0.8]]), logits=Fed(LOGITS))
    CASES.add(_xent, "mixed", labels=Fed(_soft, "float64"), logits=Fed(LOGITS))
    CASES.add(_xent, "int labels", labels=Fed([[0, 0, 1], [1, 0, 0]], "int32"), logits=Fed(LOGITS))
    CASES.add(_xent, "float64", labels=Fed(_soft, "float64"), logits=Fed(LOGITS, "float64"))
    CASES.add(_xent, "cube", labels=Fed([_soft]), logits=Fed([LOGITS]))
    CASES.add(
        _xent, "unknown", labels=Fed(_soft, shape=[None, 3]), logits=Fed(LOGITS, shape=[None, 3])
    )
    CASES.add(
        _xent,
        "large",
        labels=Fed([[1.0, 0.0], [0.0, 1.0]]),
        logits=Fed([[1000.0, 0.0], [1000.0, 0.0]]),
    )
    CASES.add(
        _xent,
        "minus infinity where no label is",
        labels=Fed([[0.0, 1.0]]),
        logits=Fed([[-INF, 0.0]]),
    )
    CASES.add(_xent, "empty", labels=Fed(np.zeros([0, 3])), logits=Fed(np.zeros([0, 3])))
    CASES.add(_xent, "slope", labels=Fed(_soft), logits=Fed(LOGITS), case={"slopes": True})
    CASES.add(_xent, "no logits", labels=Fed(_soft))
_old = Call(
    "nn.softmax_cross_entropy_with_logits", (), {"labels": Fed(_soft), "logits": Fed(LOGITS)}
)
CASES.add("nn.softmax_cross_entropy_with_logits", "old order", Fed(LOGITS), Fed(_soft), asked=_old)
_sig = "nn.sigmoid_cross_entropy_with_logits"
CASES.add(
    _sig, "plain", labels=Fed([0.0, 0.3, 1.0]), logits=Fed([-1.0, 0.0, 1.0]), case={"slopes": True}
)
CASES.add(_sig, "large", labels=Fed([0.0, 1.0]), logits=Fed([1000.0, -1000.0]))
CASES.add(_sig, "nan", labels=Fed([0.0]), logits=Fed([NAN]))
CASES.add(_sig, "other shapes", labels=Fed([0.0, 1.0]), logits=Fed([[1.0, 2.0]]))
CASES.add(_sig, "literal labels", labels=[0.0, 1.0], logits=Fed([1.0, 2.0]))
CASES.add(_sig, "mixed", labels=Fed([0, 1], "int32"), logits=Fed([1.0, 2.0]))
CASES.add(_sig, "float64", labels=Fed([0.0, 1.0], "float64"), logits=Fed([1.0, 2.0], "float64"))
CASES.add(
    _sig,
    "targets",
    targets=Fed([0.0]),
    logits=Fed([2.0]),
    asked=Call(_sig, (), {"labels": Fed([0.0]), "logits": Fed([2.0])}),
)
CASES.add(
    "nn.weighted_cross_entropy_with_logits",
    "plain",
    Fed([0.0, 0.3, 1.0]),
    Fed([-1.0, 0.0, 1.0]),
    2.0,
    case={"slopes": True},
)
CASES.add(
    "nn.weighted_cross_entropy_with_logits", "large", Fed([0.0, 1.0]), Fed([100.0, -100.0]), 0.5
)
CASES.add(
    "nn.weighted_cross_entropy_with_logits", "other shapes", Fed([0.0, 1.0]), Fed([[1.0, 2.0]]), 2.0
)
NOT_FINITE = [[NAN, 1.0, 2.0], [1.0, NAN, 0.0], [INF, 1.0, 2.0], [-INF, 1.0, 2.0], [NAN] * 3]
for _label, _p, _t, _k in (
    ("one", LOGITS, [2, 1], 1),
    ("ties", [[1.0, 1.0, 1.0], [2.0, 1.0, 1.0]], [2, 2], 2),
    ("not finite target 0", NOT_FINITE, [0] * 5, 1),
    ("not finite target 2", NOT_FINITE, [2] * 5, 1),
    ("three not finite", NOT_FINITE, [1] * 5, 3),
    ("negative", LOGITS, [-1, 0], 3),
    ("beyond", LOGITS, [3, 0], 3),
    ("k zero", LOGITS, [2, 0], 0),
    ("k beyond", LOGITS, [2, 0], 9),
    ("other sizes", LOGITS, [1], 1),
):
    CASES.add("nn.in_top_k", _label, Fed(_p), Fed(_t, "int32"), _k)
CASES.add("nn.in_top_k", "int64", Fed(LOGITS), Fed([2, 1], "int64"), 1)
for _label, _x, _k, _dtype in (
    ("two", LOGITS, 2, "float32"),
    ("one", LOGITS, 1, "float32"),
    ("ties", [1.0, 3.0, 3.0], 2, "float32"),
    ("all", LOGITS, 3, "float32"),
    ("too many", LOGITS, 4, "float32"),
    ("none", LOGITS, 0, "float32"),
    ("int32", [[5, 9, 7]], 2, "int32"),
    ("scalar", 1.0, 1, "float32"),
    ("infinite", [INF, -INF, 0.0], 2, "float32"),
    ("negative k", LOGITS, -1, "float32"),
):
    CASES.add("nn.top_k", _label, Fed(_x, _dtype), _k)
CASES.add("nn.top_k", "default", Fed(LOGITS))
CASES.add("nn.top_k", "slope", Fed([1.0, 3.0, 3.0]), 1, case={"slopes": True})

# -- convolutions and pooling --------------------------------------------------------------------------------------

_IMAGE = (np.arange(50.0).reshape(1, 5, 5, 2) % 7 - 3).tolist()
_FILTER = (np.arange(24.0).reshape(2, 2, 2, 3) % 5 - 2).tolist()
for _padding in ("SAME", "VALID"):
    for _stride in (1, 2):
        CASES.add(
            "nn.conv2d",
            f"{_padding} {_stride}",
            Fed(_IMAGE),
            Fed(_FILTER),
            [1, _stride, _stride, 1],
            _padding,
        )
        for _name in ("max_pool", "avg_pool"):
            CASES.add(
                f"nn.{_name}",
                f"{_padding} {_stride}",
                Fed(_IMAGE),
                [1, 2, 2, 1],
                [1, _stride, _stride, 1],
                _padding,
            )
        CASES.add(
            "nn.depthwise_conv2d",
            f"{_padding} {_stride}",
            Fed(_IMAGE),
            Fed(_FILTER),
            [1, _stride, _stride, 1],
            _padding,
        )
    CASES.add(
        "nn.conv2d",
        f"{_padding} dilated",
        Fed(_IMAGE),
        Fed(_FILTER),
        [1, 1, 1, 1],
        _padding,
        dilations=[1, 2, 2, 1],
    )
    CASES.add("nn.atrous_conv2d", _padding, Fed(_IMAGE), Fed(_FILTER), 2, _padding)
CASES.add(
    "nn.conv2d", "slope", Fed(_IMAGE), Fed(_FILTER), [1, 2, 2, 1], "SAME", case={"slopes": True}
)
CASES.add(
    "nn.conv2d",
    "unknown batch",
    Fed(_IMAGE, shape=[None, 5, 5, 2]),
    Fed(_FILTER),
    [1, 1, 1, 1],
    "VALID",
)
CASES.add(
    "nn.conv2d", "float64", Fed(_IMAGE, "float64"), Fed(_FILTER, "float64"), [1, 1, 1, 1], "VALID"
)
CASES.add(
    "nn.conv2d", "other channels", Fed(_IMAGE), Fed(np.zeros([2, 2, 3, 1])), [1, 1, 1, 1], "VALID"
)
CASES.add("nn.conv2d", "banana", Fed(_IMAGE), Fed(_FILTER), [1, 1, 1, 1], "BANANA")
CASES.add("nn.conv2d", "stride of batch", Fed(_IMAGE), Fed(_FILTER), [2, 1, 1, 1], "VALID")
CASES.add("nn.conv2d", "too few strides", Fed(_IMAGE), Fed(_FILTER), [1, 1], "VALID")
CASES.add(
    "nn.conv2d", "filter too large", Fed(_IMAGE), Fed(np.zeros([6, 6, 2, 1])), [1, 1, 1, 1], "VALID"
)
CASES.add("nn.conv2d", "matrix", Fed([[1.0]]), Fed(_FILTER), [1, 1, 1, 1], "VALID")
CASES.add("nn.conv2d", "lower case", Fed(_IMAGE), Fed(_FILTER), [1, 1, 1, 1], "same")
CASES.add("nn.conv2d", "named", Fed(_IMAGE), Fed(_FILTER), [1, 1, 1, 1], "SAME", name="mine")
CASES.add("nn.max_pool", "lower case", Fed(_IMAGE), [1, 2, 2, 1], [1, 1, 1, 1], "same")
CASES.add("nn.max_pool", "window of batch", Fed(_IMAGE), [2, 2, 2, 1], [1, 1, 1, 1], "SAME")
CASES.add(
    "nn.max_pool",
    "nan",
    Fed([[[[NAN], [1.0]], [[2.0], [3.0]]]]),
    [1, 2, 2, 1],
    [1, 1, 1, 1],
    "VALID",
)
CASES.add(
    "nn.max_pool",
    "unknown batch",
    Fed(_IMAGE, shape=[None, 5, 5, 2]),
    [1, 2, 2, 1],
    [1, 2, 2, 1],
    "SAME",
)
CASES.add(
    "nn.max_pool",
    "slope of ties",
    Fed(np.zeros([1, 2, 4, 1])),
    [1, 2, 2, 1],
    [1, 2, 2, 1],
    "VALID",
    case={"slopes": True},
)
CASES.add(
    "nn.max_pool",
    "slope that overlaps",
    Fed(np.ones([1, 3, 3, 1])),
    [1, 2, 2, 1],
    [1, 1, 1, 1],
    "VALID",
    case={"slopes": True},
)
CASES.add("nn.max_pool", "matrix", Fed([[1.0]]), [1, 2, 2, 1], [1, 1, 1, 1], "VALID")
CASES.add("nn.max_pool", "window too large", Fed(_IMAGE), [1, 6, 6, 1], [1, 1, 1, 1], "VALID")
CASES.add(
    "nn.avg_pool", "slope", Fed(_IMAGE), [1, 2, 2, 1], [1, 2, 2, 1], "SAME", case={"slopes": True}
)
CASES.add("nn.avg_pool", "float16", Fed(_IMAGE, "float16"), [1, 2, 2, 1], [1, 2, 2, 1], "SAME")
CASES.add(
    "nn.depthwise_conv2d", "rate", Fed(_IMAGE), Fed(_FILTER), [1, 1, 1, 1], "VALID", rate=[2, 2]
)
CASES.add("nn.depthwise_conv2d_native", "plain", Fed(_IMAGE), Fed(_FILTER), [1, 1, 1, 1], "VALID")
CASES.add(
    "nn.separable_conv2d",
    "plain",
    Fed(_IMAGE),
    Fed(_FILTER),
    Fed((np.arange(12.0).reshape(1, 1, 6, 2) - 5).tolist()),
    [1, 1, 1, 1],
    "SAME",
)
CASES.add(
    "nn.separable_conv2d",
    "other channels",
    Fed(_IMAGE),
    Fed(_FILTER),
    Fed(np.zeros([1, 1, 5, 2])),
    [1, 1, 1, 1],
    "SAME",
)
_BACK = (np.arange(12.0).reshape(1, 2, 2, 3) - 5).tolist()
CASES.add("nn.conv2d_transpose", "SAME", Fed(_BACK), Fed(_FILTER), [1, 4, 4, 2], [1, 2, 2, 1])
CASES.add(
    "nn.conv2d_transpose", "VALID", Fed(_BACK), Fed(_FILTER), [1, 3, 3, 2], [1, 1, 1, 1], "VALID"
)
CASES.add("nn.conv2d_transpose", "odd", Fed(_BACK), Fed(_FILTER), [1, 3, 3, 2], [1, 2, 2, 1])
CASES.add(
    "nn.conv2d_transpose",
    "unknown batch",
    Fed(_BACK, shape=[None, 2, 2, 3]),
    Fed(_FILTER),
    [1, 4, 4, 2],
    [1, 2, 2, 1],
)
CASES.add(
    "nn.conv2d_transpose",
    "another batch",
    Fed(_BACK, shape=[None, 2, 2, 3]),
    Fed(_FILTER),
    [2, 4, 4, 2],
    [1, 2, 2, 1],
)
CASES.add(
    "nn.conv2d_transpose", "other shape", Fed(_BACK), Fed(_FILTER), [1, 9, 9, 2], [1, 2, 2, 1]
)
CASES.add(
    "nn.conv2d_transpose", "other channels", Fed(_BACK), Fed(_FILTER), [1, 4, 4, 3], [1, 2, 2, 1]
)
for _name in ("lrn", "local_response_normalization"):
    CASES.add(f"nn.{_name}", "default", Fed(_IMAGE))
    CASES.add(f"nn.{_name}", "arguments", Fed(_IMAGE), 1, 2.0, 0.5, 0.75)

# -- embeddings ----------------------------------------------------------------------------------------------------

ROWS = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
_lookup = "nn.embedding_lookup"
for _label, _params, _ids, _kw in (
    ("one", Fed(ROWS), Fed([0, 2], "int32"), {}),
    ("negative", Fed(ROWS), Fed([0, -1], "int32"), {}),
    ("beyond", Fed(ROWS), Fed([0, 3], "int32"), {}),
    ("literal negative", Fed(ROWS), [0, -1], {}),
    ("parts", [Fed(ROWS), Fed(ROWS)], Fed([0, 1, 2, 3], "int32"), {}),
    (
        "parts div",
        [Fed(ROWS), Fed(ROWS)],
        Fed([0, 1, 2, 3], "int32"),
        {"partition_strategy": "div"},
    ),
    ("uneven parts", [Fed(ROWS), Fed(ROWS[:2])], Fed([0, 1, 2, 3, 4], "int32"), {}),
    ("banana", [Fed(ROWS), Fed(ROWS)], Fed([0], "int32"), {"partition_strategy": "banana"}),
    ("max_norm", Fed(ROWS), Fed([0, 2], "int32"), {"max_norm": 3.0}),
    ("parts negative", [Fed(ROWS), Fed(ROWS)], Fed([0, -1], "int32"), {}),
    ("matrix of ids", Fed(ROWS), Fed([[0, 1], [2, 2]], "int32"), {}),
    ("variable", Var(ROWS), Fed([0, 2], "int64"), {}),
    ("no parts", [], [0], {}),
    ("scalar id", Fed(ROWS), Fed(1, "int32"), {}),
    ("max_norm of parts", [Fed(ROWS), Fed(ROWS)], Fed([0, 3], "int32"), {"max_norm": 3.0}),
):
    CASES.add(_lookup, _label, _params, _ids, **_kw)
CASES.add(_lookup, "slope", Fed(ROWS), Fed([0, 0, 2], "int32"), case={"slopes": True})

# -- learning rates ------------------------------------------------------------------------------------------------

for _name, _args, _options in (
    ("exponential_decay", (5, 0.5), ("staircase",)),
    ("natural_exp_decay", (5, 0.5), ("staircase",)),
    ("inverse_time_decay", (5, 0.5), ("staircase",)),
    ("polynomial_decay", (5, 0.01, 2.0), ("cycle",)),
    ("cosine_decay", (10, 0.1), ()),
):
    _op = f"train.{_name}"
    CASES.add(_op, "int64 step", 0.5, Fed(7, "int64"), *_args)
    CASES.add(_op, "int32 step", 0.5, Fed(3, "int32"), *_args)
    CASES.add(_op, "step zero", 0.5, Fed(0, "int32"), *_args)
    if _name != "cosine_decay":
        CASES.add(
            _op,
            "float64 rate",
            Fed(0.5, "float64"),
            Fed(7, "int64"),
            *_args,
            case={"ulps": 1 << 27},
        )
    CASES.add(_op, "tensor rate", Fed(0.5), Fed(7, "int64"), *_args)
    CASES.add(_op, "variable step", 0.5, Var(7, "int64"), *_args)
    CASES.add(_op, "named", 0.5, Fed(7, "int64"), *_args, name="mine")
    CASES.add(_op, "no step", 0.5, None, *_args)
    for _option in _options:
        CASES.add(_op, _option, 0.5, Fed(7, "int64"), *_args, **{_option: True})
        CASES.add(_op, f"{_option} at zero", 0.5, Fed(0, "int64"), *_args, **{_option: True})
_piece = "train.piecewise_constant"
for _label, _x, _b, _v in (
    ("ints", Fed(7, "int32"), [5, 10], [1, 2, 3]),
    ("floats", Fed(7, "int32"), [5, 10], [1.0, 0.5, 0.25]),
    ("boundary", Fed(5, "int64"), [5, 10], [1.0, 0.5, 0.25]),
    ("after", Fed(11, "int64"), [5, 10], [1.0, 0.5, 0.25]),
    ("doubles", Fed(7.0), [5.0], [Np(1.0, "float64"), Np(2.5, "float64")]),
    ("before", Fed(-1, "int32"), [5, 10], [1.0, 0.5, 0.25]),
    ("too few values", Fed(7, "int32"), [5, 10], [1.0, 0.5]),
    ("one", Fed(7, "int32"), [5], [1.0, 0.5]),
    ("fractions for an int step", Fed(7, "int32"), [5.5, 10.5], [1.0, 0.5, 0.25]),
    ("ints for a float step", Fed(7.0), [5, 10], [1.0, 0.5, 0.25]),
    ("mixed values", Fed(7, "int32"), [5], [1.0, 2]),
):
    CASES.add(_piece, _label, _x, _b, _v)

# -- initial values ------------------------------------------------------------------------------------------------

CASES.add("zeros_initializer", "plain", case={"values": False})
for _name, _kw in (("zeros", {}), ("ones", {}), ("constant", {"value": 2.5})):
    CASES.add(
        "get_variable",
        f"{_name}_initializer",
        f"a_{_name}",
        [2, 3],
        initializer=Call(f"{_name}_initializer", (), _kw),
    )
    CASES.add(
        "get_variable",
        f"{_name}_initializer int32",
        f"b_{_name}",
        [2],
        Type("int32"),
        initializer=Call(f"{_name}_initializer", (), {} if not _kw else {"value": 2}),
    )
del CASES["zeros_initializer/plain"]
CASES.add(
    "get_variable",
    "list",
    "c_list",
    [4],
    initializer=Call("constant_initializer", ([1.0, 2.0, 3.0, 4.0],)),
)
CASES.add(
    "get_variable",
    "list filled up",
    "c_few",
    [4],
    initializer=Call("constant_initializer", ([1.0, 2.0],)),
)
CASES.add(
    "get_variable",
    "too many",
    "c_many",
    [1],
    initializer=Call("constant_initializer", ([1.0, 2.0],)),
)
CASES.add("get_variable", "literal", "c_literal", initializer=[1.0, 2.0])
CASES.add("get_variable", "literal and shape", "c_both", [2], initializer=[1.0, 2.0])
CASES.add("get_variable", "tensor", "c_tensor", initializer=Const([1.0, 2.0]))
CASES.add("get_variable", "no shape", "c_none")
CASES.add("get_variable", "unknown shape", "c_unknown", [None])
CASES.add("get_variable", "int32 default", "c_int", [2], Type("int32"))
CASES.add("get_variable", "bool default", "c_bool", [2], Type("bool"))
CASES.add("get_variable", "number as shape", "c_number", 3, initializer=Call("ones_initializer"))
CASES.add(
    "get_variable",
    "class as initializer",
    "c_class",
    [2],
    initializer=Call("@attrgetter", ("zeros_initializer",)),
)
del CASES["get_variable/class as initializer"]
for _name, _kw in (
    ("random_normal", {}),
    ("truncated_normal", {}),
    ("random_uniform", {}),
    ("variance_scaling", {}),
    ("glorot_normal", {}),
    ("glorot_uniform", {}),
    ("uniform_unit_scaling", {}),
):
    CASES.add(
        "get_variable",
        f"{_name}_initializer",
        f"r_{_name}",
        [2, 3],
        initializer=Call(f"{_name}_initializer", (), _kw),
        case={"values": False},
    )
    CASES.add(
        "get_variable",
        f"{_name}_initializer float64",
        f"s_{_name}",
        [2, 3],
        Type("float64"),
        initializer=Call(f"{_name}_initializer", (), _kw),
        case={"values": False},
    )
CASES.add(
    "get_variable",
    "random_normal without spread",
    "n_mean",
    [3],
    initializer=Call("random_normal_initializer", (2.0, 0.0)),
)
CASES.add(
    "get_variable",
    "truncated_normal without spread",
    "t_mean",
    [3],
    initializer=Call("truncated_normal_initializer", (2.0, 0.0)),
)
for _label, _kw in {
    "banana": {"distribution": "banana"},
    "mode banana": {"mode": "banana"},
    "scale below zero": {"scale": -1.0},
}.items():
    CASES.add("variance_scaling_initializer", _label, **_kw)
for _label, _args, _kw in (
    ("float", (1.5,), {}),
    ("int", (1,), {}),
    ("numpy float64", (Np([1.0], "float64"),), {}),
    ("dtype", (1,), {"dtype": Type("float64")}),
    ("string", ("a",), {}),
    ("bool", (True,), {}),
    ("nothing", (), {}),
    ("named", (1.0,), {"name": "mine"}),
    ("tensor", (Const([1.0]),), {}),
    ("fraction as int32", (1.5,), {"dtype": Type("int32")}),
    ("expected_shape", ([1.0],), {"expected_shape": [1]}),
    ("ragged", ([[1], [2, 3]],), {}),
):
    CASES.add("Variable", _label, *_args, **_kw)

_LABELS = [[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]
_GUESSES = [[0.5, 0.5], [0.9, 0.1], [0.2, 3.0]]
for _name in (
    "mean_squared_error",
    "absolute_difference",
    "huber_loss",
    "hinge_loss",
    "sigmoid_cross_entropy",
):
    CASES.add(f"losses.{_name}", "default", Fed(_LABELS), Fed(_GUESSES))
    CASES.add(f"losses.{_name}", "weights", Fed(_LABELS), Fed(_GUESSES), Fed([[1.0], [0.0], [2.0]]))
    CASES.add(f"losses.{_name}", "no weight at all", Fed(_LABELS), Fed(_GUESSES), 0.0)
    CASES.add(f"losses.{_name}", "a number", Fed(_LABELS), Fed(_GUESSES), 0.5)
    _elements = Call(f"losses.{_name}", (Fed(_LABELS), Fed(_GUESSES)), {"reduction": "none"})
    CASES.add("identity", f"elements of {_name}", _elements)
    CASES.add(
        f"losses.{_name}",
        "mean",
        Fed(_LABELS),
        Fed(_GUESSES),
        Fed([[1.0], [0.0], [2.0]]),
        reduction="weighted_mean",
    )
    CASES.add(f"losses.{_name}", "sum", Fed(_LABELS), Fed(_GUESSES), reduction="weighted_sum")
    CASES.add(
        f"losses.{_name}",
        "batch",
        Fed(_LABELS),
        Fed(_GUESSES),
        2.0,
        reduction="weighted_sum_over_batch_size",
    )
    CASES.add(f"losses.{_name}", "other shape", Fed(_LABELS), Fed([[1.0, 2.0, 3.0]]))
    CASES.add(f"losses.{_name}", "no reduction", Fed(_LABELS), Fed(_GUESSES), reduction="banana")
CASES.add("losses.log_loss", "default", Fed(_LABELS), Fed([[0.5, 0.5], [0.9, 0.1], [0.2, 0.0]]))
CASES.add("losses.softmax_cross_entropy", "default", Fed(_LABELS), Fed(_GUESSES))
CASES.add(
    "losses.softmax_cross_entropy", "smooth", Fed(_LABELS), Fed(_GUESSES), label_smoothing=0.2
)
CASES.add("losses.softmax_cross_entropy", "weights", Fed(_LABELS), Fed(_GUESSES), [1.0, 0.0, 2.0])
CASES.add(
    "losses.sigmoid_cross_entropy", "smooth", Fed(_LABELS), Fed(_GUESSES), label_smoothing=0.2
)
CASES.add("losses.sparse_softmax_cross_entropy", "vector", Fed([0, 1, 1]), Fed(_GUESSES))
CASES.add("losses.sparse_softmax_cross_entropy", "column", Fed([[0], [1], [1]]), Fed(_GUESSES))
CASES.add(
    "losses.sparse_softmax_cross_entropy", "weights", Fed([0, 1, 1]), Fed(_GUESSES), [1.0, 0.0, 2.0]
)

# -- pool, and losses over a sample of the classes -----------------------------------------------------------------

_IMAGE = np.arange(32.0).reshape(1, 4, 4, 2) % 7
for _label, _args in {
    "max": ([2, 2], "MAX", "VALID"),
    "average": ([2, 2], "AVG", "VALID"),
    "average padded": ([3, 3], "AVG", "SAME"),
    "max padded": ([3, 3], "MAX", "SAME"),
    "neither": ([2, 2], "SUM", "VALID"),
    "too few axes": ([2], "MAX", "VALID"),
}.items():
    CASES.add("nn.pool", _label, Fed(_IMAGE), *_args)
CASES.add("nn.pool", "strides", Fed(_IMAGE), [2, 2], "AVG", "VALID", strides=[2, 2])
CASES.add("nn.pool", "dilation", Fed(_IMAGE), [2, 2], "MAX", "VALID", dilation_rate=[2, 2])
CASES.add(
    "nn.pool", "both", Fed(_IMAGE), [2, 2], "MAX", "VALID", dilation_rate=[2, 2], strides=[2, 2]
)
CASES.add("nn.pool", "one axis", Fed(_IMAGE.reshape(1, 16, 2)), [3], "MAX", "VALID")
CASES.add("nn.pool", "slope", Fed(_IMAGE), [2, 2], "AVG", "VALID", case={"slopes": True})

_CLASSES = np.arange(12.0).reshape(6, 2) / 10 - 0.5
_OFFSETS = [0.1, -0.1, 0.2, -0.2, 0.3, -0.3]
_SAMPLE = (Const([0, 3, 1], "int64"), Const([[0.5], [0.25]]), Const([0.9, 0.4, 0.7]))
_TWO = (Const([0, 3, 1], "int64"), Const([[0.5, 0.4], [0.25, 0.3]]), Const([0.9, 0.4, 0.7]))
for _name in ("nn.nce_loss", "nn.sampled_softmax_loss"):
    for _label, _labels, _true, _sample, _more in (
        ("plain", [[4], [5]], 1, _SAMPLE, {}),
        ("hits", [[3], [5]], 1, _SAMPLE, {"remove_accidental_hits": True}),
        ("hits kept", [[3], [5]], 1, _SAMPLE, {"remove_accidental_hits": False}),
        ("two true classes", [[4, 2], [5, 0]], 2, _TWO, {}),
    ):
        CASES.add(
            _name, _label, Fed(_CLASSES), Fed(_OFFSETS), Fed(_labels, "int64"), Fed(_X), 3, 6, _true,
            sampled_values=_sample, case={"ulps": 32}, **_more,
        )  # fmt: skip
    CASES.add(
        _name, "parts", [Fed(_CLASSES[::2]), Fed(_CLASSES[1::2])], Fed(_OFFSETS), Fed([[4], [5]], "int64"), Fed(_X),
        3, 6, sampled_values=_SAMPLE, case={"ulps": 32},
    )  # fmt: skip
    CASES.add(
        _name, "its own sample", Fed(_CLASSES), Fed(_OFFSETS), Fed([[4], [5]], "int64"), Fed(_X), 3, 6,
        case={"values": False},
    )  # fmt: skip
for _name in ("nn.log_uniform_candidate_sampler", "nn.uniform_candidate_sampler"):
    CASES.add(_name, "unique", Fed([[4], [5]], "int64"), 1, 3, True, 6, case={"values": False})
    CASES.add(_name, "repeated", Fed([[4], [5]], "int64"), 1, 3, False, 6, case={"values": False})
    CASES.add(_name, "more than there are", Fed([[4], [5]], "int64"), 1, 7, True, 6)
