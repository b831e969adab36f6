"""Checkpoints of string variables."""

import pathlib

import numpy as np
import pytest

import harness
import runtime as rt
from tests.runtime.kit import TARGET, servers


@pytest.mark.parametrize("transfer", ["shared", "stream"])
def test_fetched_strings_belong_to_the_reader(tmp_path: pathlib.Path, transfer: str) -> None:
    """A reader that writes to a restored variable's fetched value changes no variable."""
    with rt.Graph().as_default(), servers(ps=1, worker=1) as made:
        with rt.device("/job:ps"):
            text = rt.Variable(["a", "b"], name="text")
        saver = harness.Saver(transfer=transfer)
        with (
            rt.Session(made[TARGET].target) as session,
            rt.Session(made["/job:ps/task:0"].target) as other,
        ):
            session.run(rt.global_variables_initializer())
            saver.restore(session, saver.save(session, str(tmp_path / "model"), global_step=1))
            for fetched in (session.run(text), other.run(text)):
                fetched[0] = b"changed by a reader"
            np.testing.assert_array_equal(session.run(text), [b"a", b"b"])
            np.testing.assert_array_equal(other.run(text), [b"a", b"b"])
