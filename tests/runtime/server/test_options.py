"""The table of a server's options, and the parts that are made of them."""

import inspect
import logging
import pathlib
import threading
from typing import Any

import psutil
import pytest

import runtime as rt
from runtime.backup.primary import DEFAULT_LAG
from runtime.server.assembly import assemble
from runtime.server.options import OptionRow, ServerOptions

CLUSTER = rt.ClusterSpec({"ps": ["localhost:0", "localhost:1"], "worker": ["localhost:2"]})
ROWS = ServerOptions.rows()
FROM_ENVIRONMENT = {
    "checkpoint_root": ("/runs,gs://bucket/run", ["/runs", "gs://bucket/run"]),
    "bind": ("0.0.0.0", "0.0.0.0"),
    "security": ("insecure", rt.Security.insecure()),
    "limits": ("connections=7", rt.Limits(connections=7)),
    "audit_log": ("audit.log", "audit.log"),
    "require_gpu": ("1", True),
}
"""By option, a text of the environment variable and its value."""
BAD: dict[str, Any] = {
    "job_name": 7,
    "task_index": "0",
    "data_port": "any",
    "unix_socket": "no",
    "ps_backups": 0.5,
    "ps_backups_lag": "all",
    "checkpoint_root": 7,
    "bind": 7,
    "security": "certs",
    "limits": {"connections": 7},
    "audit_log": 7,
    "require_gpu": "yes",
}


def options(**given: Any) -> ServerOptions:
    return ServerOptions(CLUSTER, **{"job_name": "ps", "task_index": 1} | given)


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_each_option_is_an_argument(row: OptionRow) -> None:
    """Every row names an argument of Server with the same default, and says what the argument means."""
    argument = inspect.signature(rt.Server).parameters[row.name]
    assert argument.default == getattr(
        ServerOptions(rt.ClusterSpec({"ps": ["localhost:0"]})), row.name
    )
    assert row.help.endswith(".") and row.default and row.types
    assert f"{row.name}: {row.help}" in (rt.Server.__doc__ or "")


def test_each_argument_is_an_option() -> None:
    """Server takes the options and nothing else but the cluster and ``start``."""
    assert set(inspect.signature(rt.Server).parameters) == {"cluster", "start"} | {
        row.name for row in ROWS
    }


def test_variables_are_those_documented() -> None:
    """The options that a variable can give are known, and each variable has a prefix of ours."""
    assert {row.name for row in ROWS if row.variable} == FROM_ENVIRONMENT.keys()
    assert all(row.variable.startswith("BELLWETHER_") for row in ROWS if row.variable)


@pytest.mark.parametrize("name", FROM_ENVIRONMENT)
def test_argument_outranks_its_variable(name: str) -> None:
    """A variable gives an option that is not given, and changes none that is."""
    (row,) = (row for row in ROWS if row.name == name)
    text, value = FROM_ENVIRONMENT[name]
    assert getattr(options().filled({row.variable: text}), name) == value
    assert getattr(options().filled({row.variable: ""}), name) is None
    others = {
        "security": rt.Security("token"),
        "limits": rt.Limits(connections=8),
        "require_gpu": False,
    }
    other = others.get(name, "mine")
    assert getattr(options(**{name: other}).filled({row.variable: text}), name) == other


@pytest.mark.parametrize("name", BAD)
def test_bad_values_name_their_places(name: str) -> None:
    """An error about a value names the argument and the environment variable."""
    (row,) = (row for row in ROWS if row.name == name)
    with pytest.raises(rt.InvalidArgumentError) as caught:
        options(**{name: BAD[name]})
    assert f"the option {name} is {BAD[name]!r}, not {row.types[0].__name__}" in str(caught.value)
    assert f"Server({name}=)" in str(caught.value) and row.variable in str(caught.value)


def test_task_is_found_or_requested() -> None:
    """The only task of a cluster needs no name; of several tasks the user names one."""
    assert str(ServerOptions(rt.ClusterSpec({"ps": ["localhost:0"]})).task) == "/job:ps/task:0"
    assert str(options().task) == "/job:ps/task:1"
    for wrong, says in (
        ({"job_name": None}, "explicit `job_name`"),
        ({"task_index": None}, "explicit `task_index`"),
        ({"task_index": 7}, "7"),
        ({"job_name": "other"}, "other"),
    ):
        with pytest.raises((rt.InvalidArgumentError, ValueError), match=says):
            options(**wrong)


def test_server_passes_its_options(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Every argument of Server comes to the option of its name."""
    given = {
        **{
            "job_name": "ps",
            "task_index": 1,
            "config": rt.SessionConfig(),
            "data_port": 9,
            "unix_socket": False,
        },
        **{
            "ps_backups": 1,
            "ps_backups_lag": DEFAULT_LAG + 1,
            "checkpoint_root": [str(tmp_path)],
            "bind": "::1",
        },
        **{
            "security": rt.Security.insecure(),
            "limits": rt.Limits(),
            "audit_log": str(tmp_path / "log"),
            "require_gpu": True,
        },
    }
    assert given.keys() == {row.name for row in ROWS}
    seen: list[ServerOptions] = []
    monkeypatch.setattr(rt.Server, "_serve_parts", lambda self, options: seen.append(options))
    rt.Server(CLUSTER, start=False, **given)  # type: ignore[arg-type]
    assert {name: getattr(seen[0], name) for name in given} == given


def _sockets() -> set[int]:
    return {c.fd for c in psutil.Process().net_connections("all")}


@pytest.mark.parametrize("backups", [0, 1])
def test_assembly_opens_and_starts_nothing(backups: int, tmp_path: pathlib.Path) -> None:
    """``assemble`` opens no socket and starts no thread, with or without a backup."""
    given = options(ps_backups=backups, audit_log=tmp_path / "audit", unix_socket=True)
    assemble(given).audit.close()  # finds the devices of this process, once
    threads, sockets = set(threading.enumerate()), _sockets()
    parts = assemble(given)
    # A thread of an earlier test may end meanwhile.
    assert set(threading.enumerate()) <= threads and _sockets() <= sockets
    assert parts.tensors.port == 0 and parts.tensors.unix_path is None
    assert parts.peers.dialled == () and bool(parts.backup_holder) == bool(backups)
    parts.audit.close()


def test_equal_options_make_equal_parts() -> None:
    """Two assemblies of the same options differ in random ids and tokens alone."""
    one, other = assemble(options()), assemble(options())
    assert (
        one.task == other.task
        and one.limits == other.limits
        and one.peers.cluster == other.peers.cluster
    )
    assert (
        one.credential.hosts == other.credential.hosts
        and one.life.incarnation != other.life.incarnation
    )


def test_insecure_start_warns(caplog: pytest.LogCaptureFixture) -> None:
    """A server without a credential warns when it starts, not when it is made."""
    caplog.set_level(logging.WARNING)
    with rt.Server(
        {"local": ["localhost:0"]}, security=rt.Security.insecure(), start=False
    ) as server:
        assert "is insecure" not in caplog.text
        server.start()
        assert caplog.text.count("is insecure") == 1
