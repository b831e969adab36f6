"""Scaffold: the pieces that make a model ready, gathered or made before a monitored session begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import runtime as rt
from harness.training import defaults

ScaffoldInitFn = Callable[["Scaffold", rt.Session], object]


class Scaffold:
    """What a monitored session needs of a graph. What is not given is made by ``finalize``.

    Args:
        init_op: gives the global variables their first values.
        init_feed_dict: feeds of ``init_op``.
        init_fn: called with the scaffold and the session after ``init_op``.
        ready_op: string tensor with the names of what is not ready.
        ready_for_local_init_op: the same for what ``local_init_op`` needs; by default the global variables.
        local_init_op: run in every new session.
        summary_op: string tensor of a serialized summary.
        saver: saves and restores.
        copy_from_scaffold: where to take what is not given.

    Raises:
        TypeError: ``copy_from_scaffold`` is no Scaffold.
    """

    def __init__(
        self,
        init_op: Any = None,
        init_feed_dict: Mapping[Any, Any] | None = None,
        init_fn: ScaffoldInitFn | None = None,
        ready_op: Any = None,
        ready_for_local_init_op: Any = None,
        local_init_op: Any = None,
        summary_op: Any = None,
        saver: Any = None,
        copy_from_scaffold: Scaffold | None = None,
    ) -> None:
        if copy_from_scaffold is not None and not isinstance(copy_from_scaffold, Scaffold):
            raise TypeError(f"copy_from_scaffold is not a Scaffold instance: {copy_from_scaffold!r}")

        def given(value: Any, name: str) -> Any:
            return getattr(copy_from_scaffold, name) if value is None and copy_from_scaffold is not None else value

        self.init_op = given(init_op, "init_op")
        self.init_feed_dict = given(init_feed_dict, "init_feed_dict")
        self.ready_op = given(ready_op, "ready_op")
        self.ready_for_local_init_op = given(ready_for_local_init_op, "ready_for_local_init_op")
        self.local_init_op = given(local_init_op, "local_init_op")
        self.summary_op = given(summary_op, "summary_op")
        self.saver = given(saver, "saver")
        self._user_init_fn: ScaffoldInitFn | None = (
            init_fn if init_fn or copy_from_scaffold is None else copy_from_scaffold._user_init_fn
        )

    @property
    def init_fn(self) -> Callable[[rt.Session], object] | None:
        """The user's ``init_fn`` as a function of the session alone."""
        user = self._user_init_fn
        return None if user is None else lambda session: user(self, session)

    def finalize(self) -> Scaffold:
        """Makes what is missing and finalizes the graph.

        Raises:
            RuntimeError: a collection that gives a default holds more than one item.
        """
        graph = rt.get_default_graph()
        keys = rt.GraphKeys
        for key in (keys.INIT_OP, keys.READY_OP, keys.LOCAL_INIT_OP, keys.SUMMARY_OP, keys.SAVERS):
            if len(graph.get_collection(key)) > 1:
                raise RuntimeError(
                    f"More than one item in the collection {key!r}. Please indicate which one to use by passing it to "
                    "the Scaffold constructor."
                )
        if self.init_op is None:
            self.init_op = defaults.init_op(graph)
        if self.ready_op is None:
            self.ready_op = defaults.ready_op(graph)
        if self.local_init_op is None:
            self.local_init_op = defaults.local_init_op(graph)
        if self.ready_for_local_init_op is None and self.local_init_op is not None:
            self.ready_for_local_init_op = defaults.ready_for_local_init_op(graph)
        if self.summary_op is None:
            self.summary_op = defaults.summary_op(graph)
        if self.saver is None:
            self.saver = defaults.saver(graph)
        graph.finalize()
        return self
