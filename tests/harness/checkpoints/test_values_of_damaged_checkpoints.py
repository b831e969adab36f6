"""No value of a checkpoint whose files are not as they were saved reaches anybody, with or without a session."""

import json
import pathlib
import shutil
from collections.abc import Callable

import numpy as np
import orbax.checkpoint as ocp
import pytest

import harness
import runtime as rt
from harness import tf1
from harness.checkpoints import inspection

VALUES = np.arange(1, 8193, dtype=np.float32)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Steps 1 and 2 of one large variable and a small one."""
    logdir = tmp_path_factory.mktemp("run")
    with rt.Graph().as_default(), rt.Session() as session:
        rt.Variable(VALUES, name="net/w")
        rt.Variable(np.int32(7), name="steps")
        session.run(rt.global_variables_initializer())
        saver = harness.Saver()
        for step in (1, 2):
            saver.save(session, str(logdir / "model.ckpt"), step)
    return logdir


@pytest.fixture
def copy(saved: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


def _zero(step: pathlib.Path) -> pathlib.Path:
    """Zeroes 4 KB in the middle of the largest file of a checkpoint: size and names stay as they are."""
    victim = max((p for p in step.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(victim.read_bytes())
    assert len(data) > 8192
    middle = len(data) // 2
    data[middle : middle + 4096] = bytes(4096)
    victim.write_bytes(data)
    return victim


def _init(path: str) -> None:
    with rt.Graph().as_default():
        rt.Variable(np.zeros_like(VALUES), name="net/w")
        tf1.train.init_from_checkpoint(path, {"/": "/"})


@pytest.mark.parametrize(
    "read",
    [
        lambda path: harness.load_variable(path, "net/w"),
        lambda path: harness.load_variable(path, "steps"),  # nobody knows whose bytes they were
        lambda path: harness.load_checkpoint(path).get_tensor("net/w"),
        lambda path: harness.load_pytree(path, {"w": VALUES}, "net"),
        lambda path: tf1.train.NewCheckpointReader(path).get_tensor("net/w"),
        _init,
    ],
    ids=["load_variable", "of_another", "reader", "load_pytree", "tf1", "init_from_checkpoint"],
)
def test_damaged_checkpoint_gives_no_value(
    copy: pathlib.Path, read: Callable[[str], object]
) -> None:
    """No value of a checkpoint with a damaged file is returned."""
    step = copy / "model.ckpt" / "2"
    read(str(step))
    victim = _zero(step)
    with pytest.raises(rt.DataLossError, match=f"{step} is damaged: {victim.relative_to(step)}: "):
        read(str(step))


def test_listing_reads_no_values(copy: pathlib.Path) -> None:
    """list_variables lists names without reading the damaged files."""
    _zero(copy / "model.ckpt" / "2")
    assert dict(harness.list_variables(str(copy)))["net/w"] == VALUES.shape


def test_reader_compares_files_once(copy: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader compares each file with its checksum once."""
    from runtime.lowlevel import durability

    compared: list[str] = []
    plain = durability.is_as_saved
    monkeypatch.setattr(
        durability, "is_as_saved", lambda path, *rest: compared.append(path) or plain(path, *rest)
    )
    reader = harness.load_checkpoint(str(copy))
    assert compared == []
    np.testing.assert_array_equal(reader.get_tensor("net/w"), VALUES)
    assert reader.get_tensor("steps") == 7
    assert reader.manifest is not None
    assert [str(pathlib.Path(p).relative_to(reader.path)) for p in compared] == [
        f.path for f in reader.manifest.files
    ]


@pytest.mark.parametrize("flags", [[], ["--values"], ["--verify"], ["--name=steps"]])
def test_inspection_shows_newest_whole_step(
    copy: pathlib.Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    """The inspection names a damaged file and shows the newest whole step."""
    victim = _zero(copy / "model.ckpt" / "2")
    assert inspection.main([str(copy), *flags]) == 1
    shown = capsys.readouterr().out
    (line,) = [line for line in shown.splitlines() if "DAMAGED: " in line]
    assert line.split()[0] == "2" and victim.name in line
    assert f"{copy}/model.ckpt/1: " in shown


def test_unreadable_tree_is_damaged(copy: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step whose tree cannot be read is listed as damaged."""
    tree = copy / "model.ckpt" / "2" / "default" / "_METADATA"
    tree.write_bytes(bytes(tree.stat().st_size))
    assert inspection.main([str(copy)]) == 1
    shown = capsys.readouterr().out
    assert "DAMAGED: " in shown and "_METADATA" in shown
    assert f"{copy}/model.ckpt/1: 2 variables" in shown


@pytest.mark.cluster
def test_damaged_foreign_value_is_one_line(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A damaged value in a checkpoint of another program gives one line."""
    with ocp.StandardCheckpointer() as plain:
        plain.save(tmp_path / "params", {"w": np.random.default_rng(0).random(8192)})
    assert inspection.main([str(tmp_path / "params"), "--values"]) == 0
    victim = max((p for p in tmp_path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    victim.write_bytes(bytes(victim.stat().st_size))
    capsys.readouterr()
    assert inspection.main([str(tmp_path / "params"), "--values"]) == 1
    assert capsys.readouterr().err.startswith("harness.inspect_checkpoint: ")


def test_inspection_hides_damaged_values(
    copy: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The inspection of one damaged checkpoint shows none of its variables."""
    step = copy / "model.ckpt" / "2"
    victim = _zero(step)
    for flags in ([], ["--values"], ["--json"], ["--compare", str(copy / "model.ckpt" / "1")]):
        assert inspection.main([str(step), *flags]) == 1
        shown = capsys.readouterr()
        assert f"is damaged: {victim.relative_to(step)}: " in shown.err and "net/w" not in shown.out
    assert inspection.main([str(copy / "model.ckpt" / "1"), "--compare", str(step)]) == 1
    assert f"is damaged: {victim.relative_to(step)}: " in capsys.readouterr().err


def test_verify_checks_older_steps(copy: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--verify compares the files of the older steps too."""
    victim = _zero(copy / "model.ckpt" / "1")
    assert inspection.main([str(copy), "--json"]) == 0
    assert [step["complete"] for step in json.loads(capsys.readouterr().out)["steps"]] == [
        True,
        True,
    ]
    assert inspection.main([str(copy), "--json", "--verify"]) == 1
    first, second = json.loads(capsys.readouterr().out)["steps"]
    assert second["complete"] and not first["complete"] and victim.name in first["problems"][0]


@pytest.mark.parametrize("how", ["emptied", "zeroed", "lost"])
def test_missing_last_file_is_incomplete(
    copy: pathlib.Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    """A checkpoint without its last file is damaged, and its values can still be shown."""
    step = copy / "model.ckpt" / "2"
    label = step / "_CHECKPOINT_METADATA"
    size = label.stat().st_size
    label.unlink() if how == "lost" else label.write_bytes(bytes(size if how == "zeroed" else 0))
    assert inspection.main([str(copy)]) == 1
    shown = capsys.readouterr().out
    assert "DAMAGED: _CHECKPOINT_METADATA: " in shown
    assert f"{step}: 2 variables" in shown  # its values are whole
    assert inspection.main([str(step)]) == 1
    assert "is damaged: _CHECKPOINT_METADATA: " in capsys.readouterr().err
