"""Messages of TensorBoard's plugins that are not values of tensors: hyperparameters and the custom-scalars layout."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tensorboardX.proto import api_pb2, layout_pb2, plugin_hparams_pb2, summary_pb2, types_pb2

Layout = Mapping[str, Mapping[str, Sequence[str]]]
"""Category -> chart -> regular expressions of the tags of scalars that the chart shows."""


def _value(tag: str, plugin: str, content: bytes = b"") -> Any:
    value = summary_pb2.Summary.Value(tag=tag)
    value.metadata.plugin_data.plugin_name = plugin
    value.metadata.plugin_data.content = content
    return value


def hparams_summary(values: Mapping[str, Any], metrics: Sequence[str] = (), now: float | None = None) -> Any:
    """The Summary message that gives a run its row in TensorBoard's table of hyperparameters.

    Args:
        values: name -> bool, number or string; anything else is shown as ``str`` of it, None is left out.
        metrics: tags of scalars of the same run to show in the row.
        now: when the run began, seconds since the epoch; now by default.
    """
    start = plugin_hparams_pb2.SessionStartInfo(start_time_secs=time.time() if now is None else now)
    infos = []
    for name, value in values.items():
        if value is None:
            continue
        if isinstance(value, bool | np.bool_):
            start.hparams[name].bool_value = bool(value)
            kind = api_pb2.DATA_TYPE_BOOL
        elif isinstance(value, int | float | np.number):
            start.hparams[name].number_value = float(value)
            kind = api_pb2.DATA_TYPE_FLOAT64
        else:
            start.hparams[name].string_value = str(value)
            kind = api_pb2.DATA_TYPE_STRING
        infos.append(api_pb2.HParamInfo(name=name, type=kind))
    experiment = api_pb2.Experiment(
        hparam_infos=infos, metric_infos=[api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag)) for tag in metrics]
    )
    parts = {"experiment": experiment, "session_start_info": start}
    summary = summary_pb2.Summary()
    for name, part in parts.items():
        data = plugin_hparams_pb2.HParamsPluginData(version=0, **{name: part})
        summary.value.append(_value(f"_hparams_/{name}", "hparams", data.SerializeToString()))
    return summary


def custom_scalars_summary(layout: Layout) -> Any:
    """The Summary message that groups scalars into charts of TensorBoard's custom-scalars page."""
    message = layout_pb2.Layout(
        category=[
            layout_pb2.Category(
                title=category,
                chart=[
                    layout_pb2.Chart(title=title, multiline=layout_pb2.MultilineChartContent(tag=list(tags)))
                    for title, tags in charts.items()
                ],
            )
            for category, charts in layout.items()
        ]
    )
    value = _value("custom_scalars__config__", "custom_scalars")
    value.tensor.dtype = types_pb2.DT_STRING
    value.tensor.string_val.append(message.SerializeToString())
    return summary_pb2.Summary(value=[value])
