import ml_dtypes
import numpy as np
import pytest

from runtime.errors import InvalidArgumentError
from runtime.tensor_spec import NUMERIC_DTYPES, STRING, TensorSpec, canonical_dtype


@pytest.mark.parametrize("name", sorted(NUMERIC_DTYPES))
def test_every_numeric_dtype(name):
    """Each numeric dtype makes a spec with its name and size."""
    spec = TensorSpec((2, 3), name)
    assert spec.name == name
    assert spec.nbytes == np.zeros((2, 3), spec.dtype).nbytes
    assert spec == TensorSpec.of(np.zeros((2, 3), NUMERIC_DTYPES[name]))


def test_names_cover_those_of_training():
    """The table of dtypes has the names that training uses."""
    expected = {
        "bool",
        "int8",
        "int32",
        "int64",
        "uint8",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex64",
    }
    assert expected | {"float8_e4m3fn", "int4"} <= set(NUMERIC_DTYPES)


def test_string_spec_has_no_size():
    """A spec of strings says so and has no size in bytes."""
    spec = TensorSpec((2,), np.dtype(object))
    assert spec.is_string and spec.name == "string" and str(spec) == "string[2]"
    with pytest.raises(InvalidArgumentError, match="no fixed size"):
        _ = spec.nbytes


def test_foreign_dtypes_become_canonical():
    """Foreign byte orders and aliases become the canonical dtype."""
    assert canonical_dtype(">f4") is canonical_dtype(np.float32)
    assert canonical_dtype(np.longlong) is canonical_dtype(np.int64)
    assert canonical_dtype(ml_dtypes.bfloat16) is canonical_dtype("bfloat16")
    assert canonical_dtype(object) is STRING


@pytest.mark.parametrize(
    "dtype", ["S3", "U2", "datetime64[s]", [("a", "i4")], "V4", "no such", np.longdouble]
)
def test_other_dtypes_are_refused(dtype):
    """A spec refuses dtypes that no tensor has."""
    with pytest.raises(InvalidArgumentError):
        TensorSpec((1,), dtype)


@pytest.mark.parametrize("shape", [(-1,), (1.5,), (None,), 3])
def test_bad_shapes_are_refused(shape):
    """A spec refuses shapes that are not whole sizes."""
    with pytest.raises(InvalidArgumentError):
        TensorSpec(shape, np.dtype(np.float32))


def test_specs_compare_hash_and_print():
    """Equal specs are equal and hash alike, and a spec prints as dtype and shape."""
    spec = TensorSpec((int(np.int64(2)), 3), np.dtype(np.float32))
    assert spec == TensorSpec((2, 3), np.dtype(np.float32))
    assert hash(spec) == hash(TensorSpec((2, 3), np.dtype(np.float32)))
    assert str(spec) == "float32[2,3]" and spec.size == 6
