"""The error types: codes, built-ins, text, and the way through pickle."""

import copy
import pickle

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime import errors

ALL = sorted(errors.ERROR_TYPES.items())


def test_codes_are_those_of_grpc() -> None:
    camel = {
        status.value[0]: "".join(word.capitalize() for word in status.name.split("_")) + "Error"
        for status in grpc.StatusCode
        if status is not grpc.StatusCode.OK
    }
    camel[2] = "UnknownError"
    assert {code: error_type.__name__ for code, error_type in ALL} == camel


def test_every_subclass_is_in_the_table_and_in_the_tree() -> None:
    subclasses = errors.OpError.__subclasses__()
    assert set(errors.ERROR_TYPES.values()) == {sub for sub in subclasses if sub.__module__ == errors.__name__}
    lines = (errors.__doc__ or "").splitlines()
    for code, error_type in ALL:
        (line,) = [line for line in lines if f"-- {error_type.__name__} " in line]
        assert f" {code}  " in line
        for base in error_type.__bases__[1:]:
            assert f"{base.__name__}:" in line


@pytest.mark.parametrize(
    ("code", "builtin"),
    [(3, ValueError), (4, TimeoutError), (5, LookupError), (7, PermissionError), (14, ConnectionError)],
)
def test_caught_as_the_builtin(code: int, builtin: type[Exception]) -> None:
    with pytest.raises(builtin, match="^/job:ps/task:0: boom$"):
        raise errors.error_from_code(code, "boom", "/job:ps/task:0")


@given(code=st.sampled_from([code for code, _ in ALL]), message=st.text(), task=st.text())
def test_survives_pickle_and_copy(code: int, message: str, task: str) -> None:
    error = errors.error_from_code(code, message, task)
    error.add_note("seen")
    for again in (error, pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is errors.ERROR_TYPES[code]
        assert (again.code, again.message, again.task, again.args) == (code, message, task, (message,))
        assert again.__notes__ == ["seen"]
        assert str(again) == (f"{task}: {message}" if task else message)


def test_repr_shows_the_call() -> None:
    assert repr(errors.AbortedError("gone")) == "AbortedError('gone')"
    assert repr(errors.UnavailableError("no", task="/job:ps")) == "UnavailableError('no', task='/job:ps')"


def test_unknown_code_keeps_the_number() -> None:
    error = errors.error_from_code(99, "boom", "/job:ps")
    assert type(error) is errors.UnknownError
    assert str(error) == "/job:ps: boom (status code 99)"


def test_success_is_not_an_error() -> None:
    with pytest.raises(ValueError, match="success"):
        errors.error_from_code(0, "fine")
