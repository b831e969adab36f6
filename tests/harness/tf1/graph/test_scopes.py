"""Variable scopes that are opened again: names of variables and operations are those that TensorFlow 2.21 gives."""

import threading
from collections.abc import Callable

import pytest

import harness.tf1 as tf

scope = tf.variable_scope
AUTO = tf.AUTO_REUSE


def _variable(name: str = "w") -> str:
    return tf.get_variable(name, []).op.name


def _layers() -> list[str]:
    """Two layers as a library makes them: a default name for each, and an operation in it."""
    made = []
    for _ in range(2):
        with scope(None, default_name="fc"):
            made += [_variable(), tf.constant(1.0, name="c").op.name]
    return made


def _by_name() -> list[str]:
    with scope("model", reuse=AUTO):
        first = _layers()
    with scope("model", reuse=AUTO):
        return first + _layers()


def _by_scope() -> list[str]:
    with scope("model") as model:
        first = _layers()
    with scope(model, reuse=True):
        return first + _layers()


def _nested() -> list[str]:
    with scope("a"):
        with scope("b"):
            made = _layers()
        with scope("b", reuse=AUTO):
            made += _layers()
    with scope("a/b", reuse=AUTO):
        return made + _layers()


def _explicit_names_count() -> list[str]:
    made = []
    for name, default in [
        ("fc", None),
        (None, "fc"),
        (None, "fc"),
        ("fc_3", None),
        (None, "fc"),
        (None, "fc"),
    ]:
        with scope(name, default):
            made.append(_variable())
    return made


def _left_and_opened_inside() -> list[str]:
    made = []
    with scope("a") as a:
        with scope(None, "fc"):
            made.append(_variable())
        with scope(a), scope(None, "fc"):
            made.append(_variable("w2"))
        with scope(None, "fc"):
            made.append(_variable("w3"))
    return made


def _the_top_again() -> list[str]:
    made = _layers()
    with tf.name_scope("tower"), scope(tf.get_variable_scope(), reuse=AUTO):
        return made + _layers()


def _layers_in_layers() -> list[str]:
    made = []
    for _ in range(2):
        with scope("a", reuse=AUTO), scope(None, "fc"):
            made += _layers()
    return made


CASES: dict[Callable[[], list[str]], str] = {
    _by_name: "model/fc/w model/fc/c model/fc_1/w model/fc_1/c model/fc/w model_1/fc/c model/fc_1/w model_1/fc_1/c",
    _by_scope: "model/fc/w model/fc/c model/fc_1/w model/fc_1/c model/fc/w model_1/fc/c model/fc_1/w model_1/fc_1/c",
    _nested: "a/b/fc/w a/b/fc/c a/b/fc_1/w a/b/fc_1/c a/b/fc/w a/b_1/fc/c a/b/fc_1/w a/b_1/fc_1/c "
    "a/b/fc/w a/b_2/fc/c a/b/fc_1/w a/b_2/fc_1/c",
    _explicit_names_count: "fc/w fc_1/w fc_2/w fc_3/w fc_4/w fc_5/w",
    _left_and_opened_inside: "a/fc/w a/fc_1/w2 a/fc_1/w3",
    _the_top_again: "fc/w fc/c fc_1/w fc_1/c fc_2/w tower/fc/c fc_3/w tower/fc_1/c",
    _layers_in_layers: "a/fc/fc/w a/fc/fc/c a/fc/fc_1/w a/fc/fc_1/c a/fc/fc/w a_1/fc/fc/c a/fc/fc_1/w a_1/fc/fc_1/c",
}


@pytest.mark.parametrize("build", CASES, ids=lambda f: f.__name__.strip("_"))
def test_scope_names_are_tensorflows(build: Callable[[], list[str]]) -> None:
    """Scopes that are opened again give the names of TensorFlow."""
    with tf.Graph().as_default():
        assert build() == CASES[build].split()


def test_reused_net_shares_its_weights() -> None:
    """A net that is built again in the same scope uses the trained weights."""

    def net(x: object) -> object:
        with scope(None, default_name="fc"):
            return x * tf.get_variable("w", [], initializer=tf.constant_initializer(2.0))

    with tf.Graph().as_default():
        x = tf.placeholder(tf.float32, [])
        with scope("model", reuse=AUTO):
            trained = net(x)
        with scope("model", reuse=AUTO):
            evaluated = net(x)
        (weight,) = tf.global_variables()
        with tf.Session() as sess:
            sess.run(tf.global_variables_initializer())
            sess.run(weight.assign(200.0))
            assert sess.run([trained, evaluated], {x: 1.0}) == [200, 200]


def test_scope_object_keeps_its_reuse() -> None:
    """A scope object keeps its own reuse and its first name scope."""
    with tf.Graph().as_default():
        with scope("a") as a:
            assert a.original_name_scope == "a/"
        with scope("b", reuse=True):
            with scope(a) as opened:
                assert tf.get_variable("x", []).op.name == "a/x", "b's reuse is not a's"
            assert (opened.name, opened.original_name_scope) == ("a", "a/")
        with scope("frozen", reuse=True) as frozen:
            pass
        with scope(frozen), pytest.raises(ValueError, match="frozen/w does not exist"):
            _variable()
        with (
            pytest.raises(ValueError, match="reuse=True cannot be used without a name_or_scope"),
            scope(None, "d", reuse=True),
        ):
            pass


def test_threads_number_their_own_scopes() -> None:
    """Each thread numbers its own scopes."""
    graph, names = tf.Graph(), []

    def build() -> None:
        with graph.as_default(), scope(None, "fc") as mine:
            names.append(mine.name)

    for _ in range(2):
        thread = threading.Thread(target=build)
        thread.start()
        thread.join()
    assert names == ["fc", "fc"]
