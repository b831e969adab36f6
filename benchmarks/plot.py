"""Draws a results file: `python plot.py step_rate.json step_rate.png`. Needs matplotlib and nothing of this project."""

import json
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

COLOURS = {
    "ours": "#1b6ca8",
    "pipelined": "#0a3d62",
    "tcp": "#82b8dd",
    "plain": "#999999",
    "tf": "#e58e26",
    "torch": "#b33939",
}


def main(source: str, target: str) -> None:
    """One panel for each width of the model, one group of bars for each cluster."""
    with open(source) as file:
        document = json.load(file)
    widths = sorted({row["hidden"] for row in document["rows"]})
    figure, panels = plt.subplots(1, len(widths), figsize=(6 * len(widths), 4), squeeze=False)
    for panel, width in zip(panels[0], widths, strict=True):
        rows = [row for row in document["rows"] if row["hidden"] == width]
        for at, row in enumerate(rows):
            present = [name for name in COLOURS if name in row["systems"]]
            for i, name in enumerate(present):
                x = at + (i - len(present) / 2) * 0.13
                panel.bar(
                    x, row["systems"][name]["steps_per_s"], 0.12, color=COLOURS[name], label=name
                )
        panel.set_xticks(
            range(len(rows)), [f"{row['ps']} ps, {row['workers']} workers" for row in rows]
        )
        panel.set_title(f"784-{width}-10, batch 100")
        panel.set_ylabel("steps/s, all workers together")
        names = dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
        panel.legend(names.values(), names.keys(), fontsize=8)
    cores = document["machine"]["cores"]
    figure.suptitle(
        f"Asynchronous training on {cores} cores of {document['machine']['cpu']}, "
        f"{document['date']}"
    )
    figure.tight_layout()
    figure.savefig(target, dpi=120)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
