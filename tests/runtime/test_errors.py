"""The error types: codes, built-ins, text, and the way through pickle."""

import ast
import copy
import pickle
from concurrent import futures

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime import errors
from runtime.rpc import rpc
from runtime.wire import frames
from tests.tools import house

ALL = sorted(errors.ERROR_TYPES.items())


def test_codes_are_those_of_grpc() -> None:
    """Each status of gRPC but OK has an error type of the same name and number."""
    camel = {
        status.value[0]: "".join(word.capitalize() for word in status.name.split("_")) + "Error"
        for status in grpc.StatusCode
        if status is not grpc.StatusCode.OK
    }
    camel[2] = "UnknownError"
    assert {code: error_type.__name__ for code, error_type in ALL} == camel


def test_every_subclass_is_in_the_tree() -> None:
    """Every error type is in the table and in the tree of the module's docstring, with its bases."""
    subclasses = errors.OpError.__subclasses__()
    assert set(errors.ERROR_TYPES.values()) == {
        sub for sub in subclasses if sub.__module__ == errors.__name__
    }
    lines = (errors.__doc__ or "").splitlines()
    for code, error_type in ALL:
        (line,) = [line for line in lines if f"-- {error_type.__name__} " in line]
        assert f" {code}  " in line
        for base in error_type.__bases__[1:]:
            assert f"{base.__name__}:" in line


@pytest.mark.parametrize(
    ("code", "builtin"),
    [
        (3, ValueError),
        (4, TimeoutError),
        (5, LookupError),
        (7, PermissionError),
        (14, ConnectionError),
    ],
)
def test_errors_are_caught_as_builtins(code: int, builtin: type[Exception]) -> None:
    """An error is also the built-in exception of its meaning."""
    with pytest.raises(builtin, match="^/job:ps/task:0: boom$"):
        raise errors.error_from_code(code, "boom", "/job:ps/task:0")


@given(code=st.sampled_from([code for code, _ in ALL]), message=st.text(), task=st.text())
def test_errors_survive_pickle_and_copy(code: int, message: str, task: str) -> None:
    """A pickled or copied error keeps its type, code, text, task and notes."""
    error = errors.error_from_code(code, message, task)
    error.add_note("seen")
    for again in (error, pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is errors.ERROR_TYPES[code]
        assert (again.code, again.message, again.task, again.args) == (
            code,
            message,
            task,
            (message,),
        )
        assert again.__notes__ == ["seen"]
        assert str(again) == (f"{task}: {message}" if task else message)


def test_repr_shows_the_call() -> None:
    """The repr of an error is the call that makes the error."""
    assert repr(errors.AbortedError("gone")) == "AbortedError('gone')"
    assert (
        repr(errors.UnavailableError("no", task="/job:ps"))
        == "UnavailableError('no', task='/job:ps')"
    )


def test_unknown_code_keeps_the_number() -> None:
    """An unknown code becomes an UnknownError that shows the number."""
    error = errors.error_from_code(99, "boom", "/job:ps")
    assert type(error) is errors.UnknownError
    assert str(error) == "/job:ps: boom (status code 99)"


def test_success_is_not_an_error() -> None:
    """Code 0 makes no error."""
    with pytest.raises(ValueError, match="success"):
        errors.error_from_code(0, "fine")


KINDS = [
    sub
    for error_type in errors.ERROR_TYPES.values()
    for sub in error_type.__subclasses__()
    if sub.kind
]


def test_every_kind_has_its_number() -> None:
    """Every finer kind of error is in the tree once and has its own number."""
    lines = (errors.__doc__ or "").splitlines()
    assert errors.TaskLeftError in KINDS and len(KINDS) >= 7
    assert all(sum(f"-- {kind.__name__} " in line for line in lines) == 1 for kind in KINDS)
    assert len({errors.wire_code(kind()) for kind in KINDS}) == len(KINDS)


@pytest.mark.parametrize("error_type", [*errors.ERROR_TYPES.values(), *KINDS])
def test_type_crosses_between_tasks(error_type: type[errors.OpError]) -> None:
    """An error keeps its type, text and task over the tensor channel."""
    error = error_type("boom", task="/job:ps/task:0")
    again = errors.error_from_code(errors.wire_code(error), error.message, error.task)
    over_the_channel = frames.decode_error(frames.pack_error(0, error)[frames.HEADER_BYTES :], "")
    assert type(again) is type(over_the_channel) is error_type
    assert (over_the_channel.message, over_the_channel.task) == (error.message, error.task)


@pytest.mark.parametrize("error_type", [errors.AbortedError, *KINDS])
def test_type_crosses_the_control_plane(error_type: type[errors.OpError]) -> None:
    """An error keeps its type, text and task over gRPC."""

    class Servicer:
        def fail(self, request: bytes, context: grpc.ServicerContext) -> bytes:
            rpc.abort(context, error_type("boom", task="/job:ps/task:7"))

    server = grpc.server(futures.ThreadPoolExecutor(1))
    handler = grpc.unary_unary_rpc_method_handler(Servicer().fail)
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("test", {"fail": handler})]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with rpc.open_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(error_type, match="^/job:ps/task:7: boom$") as caught:
                rpc.call(channel.unary_unary("/test/fail"), b"", timeout=30, task="/job:ps/task:0")
        assert type(caught.value) is error_type
    finally:
        server.stop(None).wait()


def test_newer_kind_becomes_known_type() -> None:
    """An unknown kind of a newer peer becomes the type of its code."""
    assert type(errors.error_from_code(1 | 200 << 8, "boom")) is errors.CancelledError


OF_LIBRARIES = {
    "runtime/errors.py",
    "runtime/rpc/rpc.py",
    "runtime/checkpoint/storage.py",
    "harness/checkpoints/orbax.py",
}
"""Where the text of an error decides, as gRPC, XLA or tensorstore tells nothing else."""


def test_no_decision_reads_messages() -> None:
    """No condition in the product looks into the text of an error of its own."""
    texts = ("str(error)", "str(e)", "str(cause)")
    found = set()
    for package in ("runtime", "harness"):
        for path in house.modules(package).values():
            text = path.read_text()
            if not any(sign in text for sign in (".message", *texts)):
                continue
            for node in ast.walk(house.tree(path)):
                if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
                    asked = ast.unparse(node.comparators[0])
                    if asked.endswith(".message") or asked in texts:
                        found.add(str(path.relative_to(house.ROOT)))
    assert found <= OF_LIBRARIES


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a plain ünïcode line", "a plain ünïcode line"),
        ("red \x1b[31m", "red \\x1b[31m"),
        ("\x9b2J\u202eback", "\\x9b2J\\u202eback"),
        ("bell\x07", "bell\\x07"),
    ],
)
def test_foreign_text_moves_no_cursor(text: str, shown: str) -> None:
    """Control characters of foreign text are shown escaped."""
    assert errors.one_line(text) == errors.printable(text) == shown
