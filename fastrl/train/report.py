"""`fastrl report RUN_DIR`: the curves of a run as PNG files and one HTML page that holds everything."""

from __future__ import annotations

from pathlib import Path

from fastrl.train.report_data import read_run
from fastrl.train.report_html import page
from fastrl.train.report_plots import draw_plots, plot_names
from fastrl.train.storage import replace_file, writing

__all__ = ["write_report"]


def write_report(run_dir: Path) -> Path:
    """The path of RUN_DIR/report/index.html, written together with one PNG file per curve.

    Reads config.toml, metrics.jsonl, eval.jsonl, samples.jsonl and eval_samples.jsonl. A run may still
    be going on or may have crashed: curves without numbers are left out, and lines that cannot be read
    are named on the page. The page needs no other file, and shows text from the model as text.

    Raises ValueError when the folder does not exist or has neither a finished step nor an evaluation.
    Deterministic: the same files give the same report.
    """
    run = read_run(run_dir)
    plots = draw_plots(run)
    folder = run_dir / "report"
    with writing(folder):
        folder.mkdir(exist_ok=True)
        for name in plot_names():
            (folder / f"{name}.png").unlink(missing_ok=True)
        for plot in plots:
            (folder / f"{plot.name}.png").write_bytes(plot.light)
    # Whole at any moment, because a browser may reload it during training.
    replace_file(folder / "index.html", page(run, plots).encode())
    return folder / "index.html"
