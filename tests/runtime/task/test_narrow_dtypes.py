"""Variables of dtypes that have less than a byte for an element."""

import ml_dtypes
import numpy as np
import pytest

import runtime as rt
from tests.runtime.kit import KINDS, target_of_kind

DTYPES = [ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.float4_e2m1fn]


@pytest.mark.parametrize("kind", KINDS)
def test_narrow_dtypes_are_computed(kind: str) -> None:
    """Variables of narrow dtypes are fed, updated and computed with."""
    with (
        rt.Graph().as_default(),
        target_of_kind(kind) as target,
        rt.device("" if kind == "private" else "/job:ps"),
    ):
        for dtype in DTYPES:
            one = np.array([1, 2, 3, 1], dtype)
            name = np.dtype(dtype).name
            v = rt.Variable(one, dtype=dtype, name=name)
            fed = rt.placeholder(dtype, [4])
            doubled = v.update(lambda old, x: old + x, fed, name=f"{name}_add")
            wide = rt.call(lambda x: x.astype(np.float32) * 2, v)
            over = rt.call(lambda x: x[::-1], rt.call(lambda x: x[:3], v))
            with rt.Session(target) as session:
                session.run(v.initializer)
                np.testing.assert_array_equal(session.run(v), one)
                np.testing.assert_array_equal(session.run(wide), [2, 4, 6, 2])
                np.testing.assert_array_equal(session.run(over), one[:3][::-1])
                for _ in range(2):  # of what a program has given
                    session.run(v.assign(fed), {fed: one})
                    np.testing.assert_array_equal(
                        session.run(doubled, {fed: one}).astype(np.float32), [2, 4, 6, 2]
                    )
                    np.testing.assert_array_equal(session.run(wide), [4, 8, 12, 4])
