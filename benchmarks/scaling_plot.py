"""Draws scaling.json: `python scaling_plot.py scaling.json scaling.png`. Needs matplotlib, nothing of this project."""

import json
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

COLOURS = {1: "#0a3d62", 2: "#1b6ca8", 4: "#e58e26", 8: "#b33939", 16: "#6c5b7b"}


def main(source: str, target: str) -> None:
    """Measured points on the model's curves; bytes of each ps; the model of a cluster with hosts of their own."""
    with open(source) as file:
        document = json.load(file)
    figure, (rates, moved, beyond) = plt.subplots(1, 3, figsize=(17, 4.6))
    for ps in sorted({p["ps"] for p in document["points"]}):
        curve = [c for c in document["curves"] if c["ps"] == ps]
        points = [p for p in document["points"] if p["ps"] == ps]
        workers = [p["workers"] for p in points]
        rates.plot(
            [c["workers"] for c in curve], [c["steps_per_s"] for c in curve], color=COLOURS[ps], label=f"{ps} ps"
        )
        rates.plot(workers, [p["steps_per_s"] for p in points], "o", color=COLOURS[ps])
        traffic = [p["ps_bytes"] * p["steps_per_s"] / 1e6 for p in points]
        moved.plot(workers, traffic, "o-", color=COLOURS[ps], label=f"{ps} ps")
    rates.set_title(f"One host of {document['cores']} cores, 784-{document['hidden']}-10: points measured, lines model")
    rates.set_ylabel("steps/s, all workers together")
    moved.set_title("The same runs: bytes of a ps (mean over them), both ways")
    moved.set_ylabel("MB/s of a ps")
    for ps in sorted({f["ps"] for f in document["forecasts"]}):
        told = [f for f in document["forecasts"] if f["ps"] == ps]
        beyond.plot([f["workers"] for f in told], [f["steps_per_s"] for f in told], color=COLOURS[ps], label=f"{ps} ps")
    beyond.set_xscale("log", base=2)
    beyond.set_yscale("log")
    beyond.set_title("Model only: hosts of their own, 100 MB, 50 ms a step, 10 Gbit/s")
    beyond.set_ylabel("steps/s, all workers together")
    for panel in (rates, moved, beyond):
        panel.set_xlabel("workers")
        panel.title.set_fontsize(10)
        panel.set_ylim(bottom=0 if panel is not beyond else None)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(target, dpi=100)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
