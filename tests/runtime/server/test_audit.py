"""The audit log: what others had a task do, whom it refused, and nothing of what they say that could move a cursor."""

import json
import pathlib
import stat
from typing import Any

import grpc
import numpy as np
import pytest

import harness
import runtime as rt
from runtime.observe import audit
from runtime.observe.audit import LOGGER, AuditLog
from runtime.proto import run_record_pb2, services_pb2_grpc
from runtime.proto import services_pb2 as pb
from runtime.rpc import rpc
from runtime.server import calls
from runtime.trust.security import RefusalLog
from tests.kit.changes import SetVariables
from tests.runtime.kit import TARGET, addresses, servers
from tests.runtime.stranger import challenge

PS = "/job:ps/task:0"


@pytest.fixture
def log(tmp_path: pathlib.Path, set_variables: SetVariables) -> pathlib.Path:
    """A file to which all servers of the test append."""
    path = tmp_path / "audit.jsonl"
    set_variables(BELLWETHER_AUDIT_LOG=str(path))
    return path


def read(log: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def actions(log: pathlib.Path, task: str = PS) -> list[str]:
    return [line["action"] for line in read(log) if line["task"] == task]


def test_programs_checkpoints_and_resets_are_audited(
    log: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """The audit log has each program, checkpoint order and reset, begun and done, with the peer."""
    with servers(sockets=True, ps=1, worker=1) as made, rt.Graph().as_default():
        with rt.device(PS):
            v = rt.Variable(np.zeros(3, np.float32), name="v")
        update = v.assign_add(np.ones(3, np.float32))
        with rt.Session(made[TARGET].target) as sess:
            sess.run(v.initializer)
            sess.run(update)
            first = actions(log).count("program")
            sess.run(update)  # known: no new program
            assert actions(log).count("program") == first > 0
            harness.Saver().save(sess, str(tmp_path / "model.ckpt"), 1)
        rt.Session.reset(made[TARGET].target)
        lines = read(log)
        assert stat.S_IMODE(log.stat().st_mode) == 0o600
    begun, done = (
        [line for line in lines if (line["outcome"] == "begun") is now] for now in (True, False)
    )
    assert {line["outcome"] for line in done} == {"ok"} and len(begun) == len(done)
    lines = done
    told = actions(log)
    order = [
        told.index(action) for action in ("program", "checkpoint.take", "checkpoint.write", "clear")
    ]
    assert order == sorted(order)
    (hash_, *_) = [line["what"] for line in lines if line["action"] == "program"]
    assert len(bytes.fromhex(hash_)) == 32
    (where,) = {line["what"] for line in lines if line["action"] == "checkpoint.write"}
    assert where.startswith(str(tmp_path))
    assert all(
        line["peer"].startswith(("ipv4:127.", "ipv6:"))
        for line in lines
        if line["action"] == "program"
    )


def test_refusals_are_audited_once_a_minute(log: pathlib.Path) -> None:
    """Refused callers are counted each time and audited once a minute."""
    with rt.Server(addresses(ps=1), "ps", 0) as server:
        before = server.report().values.get("refused_total", 0)
        for proof in ("wrong", "wrong again"):
            with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError):
                nonce = challenge(channel)
                stub = services_pb2_grpc.WorkerServiceStub(channel)
                stub.Clear(
                    pb.ClearRequest(all=True),
                    timeout=60,
                    metadata=[("bellwether-proof", f"{nonce}.ours.{proof}")],
                )
        # two without a proof, two with a wrong one
        assert server.report().values["refused_total"] == before + 4
    (line,) = read(log)
    assert (line["action"], line["outcome"], line["task"]) == ("connect", "refused", PS)
    assert "token" in line["what"]


def test_failed_order_is_audited_with_code(log: pathlib.Path) -> None:
    """A failed order is audited with its error, and an order that only looks is not audited."""
    with rt.Server(addresses(ps=1), "ps", 0) as server, rpc.open_channel(server.address) as channel:
        stub = services_pb2_grpc.WorkerServiceStub(channel)
        order = run_record_pb2.RunOrder(
            incarnation=1, open=run_record_pb2.RunOrder.Open(logdir="/runs")
        )
        with pytest.raises(grpc.RpcError):
            stub.Run(order, timeout=60)
        with pytest.raises(grpc.RpcError):
            stub.Run(
                run_record_pb2.RunOrder(incarnation=1, inspect=run_record_pb2.RunOrder.Inspect()),
                timeout=60,
            )
    begun, line = read(log)
    assert (line["action"], line["what"], line["outcome"]) == ("run.open", "/runs", "AbortedError")
    assert (begun["action"], begun["what"], begun["outcome"]) == ("run.open", "/runs", "begun")


def test_full_log_gives_way(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full audit log becomes `.1`, and no line is lost at the change."""
    monkeypatch.setattr(audit, "_MOST_BYTES", 1000)
    path = tmp_path / "log"
    # tasks of a host may share a file
    logs = [AuditLog(f"/job:ps/task:{n}", path) for n in range(2)]
    for n in range(40):
        logs[n % 2].write("clear", peer=str(n), outcome="ok")
    for log in logs:
        log.close()
    kept = [tmp_path / "log.1", path]
    assert all(file.stat().st_size < 1200 for file in kept)
    peers = [line["peer"] for file in kept for line in read(file)]
    assert len(peers) > 5 and peers == [str(n) for n in range(40 - len(peers), 40)]


def test_foreign_text_begins_no_line(tmp_path: pathlib.Path) -> None:
    """Foreign text in the audit log moves no cursor, begins no line and is cut to its limit."""
    log = AuditLog("/job:ps/task:0", tmp_path / "log")
    log.write("clear\x1b[2J", peer="\r\n{}", who="\x9b31m\u202e", what="a\nb" * 1000, outcome="ok")
    log.close()
    log.write("after", peer="", outcome="ok")  # to the logger only
    text = (tmp_path / "log").read_text()
    assert text.isascii() and text[:-1].isprintable() and text.endswith("\n")
    assert len(json.loads(text)["what"]) == 500


def test_failed_calls_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Failed calls of a client are logged once a minute, with the first one's number."""
    refusals = RefusalLog(PS)
    for number in range(5):
        refusals.report_failure(
            "127.0.0.1", f"call {number} of client 7", ValueError("no such shape")
        )
    assert (
        len(caplog.records) == 1
        and "Call 0 of client 7" in caplog.text
        and "Call 1" not in caplog.text
    )


def test_program_handlers_get_audit_lines(caplog: pytest.LogCaptureFixture) -> None:
    """A handler that the program has added gets the audit lines too."""
    LOGGER.addHandler(caplog.handler)
    try:
        AuditLog("/job:ps/task:0").write("clear", peer="ipv4:127.0.0.1:1", outcome="ok")
    finally:
        LOGGER.removeHandler(caplog.handler)
    (record,) = caplog.records
    assert json.loads(record.getMessage())["action"] == "clear"


def test_unwritable_audit_file_is_named(tmp_path: pathlib.Path) -> None:
    """A server with an audit log that cannot be written is refused with the file."""
    with pytest.raises(rt.InvalidArgumentError, match=f"audit log {tmp_path}/no/log: No such file"):
        rt.Server(addresses(ps=1), "ps", 0, audit_log=tmp_path / "no" / "log")


def test_audited_orders_exist() -> None:
    """Every audited order and its field exist in the protocol."""
    for audited, message in (
        (calls.AUDITED_CHECKPOINT_ORDERS, pb.CheckpointOrder),
        (calls.AUDITED_RUN_ORDERS, run_record_pb2.RunOrder),
    ):
        orders = {field.name: field for field in message.DESCRIPTOR.oneofs_by_name["order"].fields}
        for order, field in audited.items():
            assert not field or field in orders[order].message_type.fields_by_name
