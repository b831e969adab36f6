"""Messages of TensorBoard's plugins that are not values of tensors: hyperparameters and the custom-scalars layout."""

from collections.abc import Mapping, Sequence

import numpy as np
from tensorboardX import summary
from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData
from tensorboardX.proto.summary_pb2 import Summary

from runtime import concurrency

Layout = Mapping[str, Mapping[str, Sequence[str]]]
"""Category -> chart -> regular expressions of the tags of scalars that the chart shows."""


def hparams_summary(
    values: Mapping[str, object], metrics: Sequence[str] = (), now: float | None = None
) -> Summary:
    """Returns the Summary message that gives a run its row in TensorBoard's table of hyperparameters.

    Args:
        values: name -> bool, number or string. Other values are shown as text, and None is left
            out.
        metrics: tags of scalars of the same run to show in the row.
        now: beginning of the run, seconds since the epoch; now by default.
    """
    experiment, start, _ = summary.hparams(
        {k: _plain_value(v) for k, v in values.items()}, dict.fromkeys(metrics)
    )
    plugin = start.value[0].metadata.plugin_data
    # The message lies in the summary as bytes.
    data = HParamsPluginData.FromString(plugin.content)
    data.session_start_info.start_time_secs = concurrency.wall_time() if now is None else now
    plugin.content = data.SerializeToString()
    return Summary(value=[*experiment.value, *start.value])


def _plain_value(value: object) -> bool | float | str | None:
    if isinstance(value, np.generic):
        value = value.item()
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def custom_scalars_summary(layout: Layout) -> Summary:
    """Returns the Summary message that groups scalars into charts of TensorBoard's custom-scalars page."""
    return summary.custom_scalars(
        {
            category: {title: ("Multiline", list(tags)) for title, tags in charts.items()}
            for category, charts in layout.items()
        }
    )
