"""What compression does to the model: the examples through the real launcher, several seeds, equal steps.

    python -m benchmarks.bench_fidelity --seeds 0 1 2 --json benchmarks/results/fidelity.json

Each run is a `deepspeed` job of 4 ranks as 2 nodes of 2 and takes one to two minutes on two cores. A run that stands in
the JSON file already is not made again, so that a stopped benchmark can be gone on with; give a new file for new runs.
"""

import argparse
import copy
import json
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from examples.launch import ROOT, launch

Results = dict[str, dict[str, dict[str, Any]]]  # row -> seed -> result of the job


@dataclass(frozen=True)
class Row:
    """One way to train: a configuration of configs/ with changes to its `compressed_communication` section."""

    config: str
    section: dict[str, Any] = field(default_factory=dict)
    script: str = "examples/train_lm.py"


def momentum(density: float, **settings: Any) -> Row:
    section = {"compressor": {"density": density}, "sparse_momentum": settings}
    return Row("mstopk_zero1", section)


DIGITS = "examples/train_digits.py"
LANGUAGE_MODEL = {
    "dense": Row("dense"),
    "sparse_momentum 1 %": momentum(0.01),
    "sparse_momentum 5 %": momentum(0.05),
    "sparse_momentum 1 %, beta1 0.9": momentum(0.01, beta1=0.9),
    "sparse_gradient 1 % with AdamW": Row(
        "mstopk_zero1", {"method": "sparse_gradient", "sparse_momentum": None, "schedule": {"dense_steps": 120}}
    ),
}
ROWS = LANGUAGE_MODEL | {
    "digits dense": Row("digits_dense", script=DIGITS),
    "digits sparse_gradient 1 %": Row("digits_sparse_gradient", script=DIGITS),
}


def configuration(row: Row) -> dict[str, Any]:
    """The whole DeepSpeed configuration of a row, without TensorBoard."""
    config = json.loads((ROOT / "configs" / f"{row.config}.json").read_text())
    config.pop("tensorboard", None)
    section = config["compressed_communication"]
    for key, value in copy.deepcopy(row.section).items():
        section[key] = section.get(key, {}) | value if isinstance(value, dict) else value
    config["compressed_communication"] = {key: value for key, value in section.items() if value not in (None, {})}
    return config


def train(row: Row, seed: int) -> dict[str, Any]:
    """One job."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "ds_config.json"
        config.write_text(json.dumps(configuration(row)))
        arguments = [row.script, "--deepspeed_config", str(config), "--seed", str(seed)]
        return launch(arguments, Path(folder) / "result.json", quiet=True)


def language_model_table(results: Results) -> str:
    """Markdown: mean validation loss over the seeds, and the gap to dense, seed by seed."""
    lines = ["| run | validation loss | gap to dense | by seed | dense/wire, compressed |", "|---|---|---|---|---|"]
    for name in LANGUAGE_MODEL:
        seeds = sorted(set(results.get(name, {})) & set(results.get("dense", {})))
        if not seeds:
            continue
        losses = [results[name][seed]["validation_loss"] for seed in seeds]
        gaps = [100 * (loss / results["dense"][seed]["validation_loss"] - 1)
                for loss, seed in zip(losses, seeds, strict=True)]
        phase = results[name][seeds[0]]["compressed_phase"]
        wire = f"{phase['dense_bytes'] / phase['inter_node_bytes']:.1f}x" if phase["steps"] else "-"
        by_seed = ", ".join(f"{gap:+.2f}" for gap in gaps)
        loss, gap = f"{statistics.mean(losses):.4f}", f"{statistics.mean(gaps):+.2f} %"
        lines.append(f"| {name} | {loss} | {gap} | {by_seed} | {wire} |")
    return "\n".join(lines)


def digits_table(results: Results) -> str:
    """Markdown: mean accuracy over the seeds."""
    lines = ["| run | accuracy % | by seed |", "|---|---|---|"]
    for name in set(ROWS) - set(LANGUAGE_MODEL):
        scores = [result["accuracy"] for _, result in sorted(results.get(name, {}).items())]
        if scores:
            lines.append(f"| {name} | {statistics.mean(scores):.2f} | {', '.join(f'{s:.2f}' for s in scores)} |")
    return "\n".join(sorted(lines, key=lambda line: line.startswith("| digits")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS), metavar="ROW")
    parser.add_argument("--json", type=Path, default=ROOT / "runs" / "fidelity.json", help="(default: %(default)s)")
    args = parser.parse_args()
    results: Results = json.loads(args.json.read_text()) if args.json.exists() else {}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    for name in args.rows:
        for seed in args.seeds:
            done = results.setdefault(name, {})
            if str(seed) not in done:
                print(f"{name}, seed {seed} ...", flush=True)
                done[str(seed)] = train(ROWS[name], seed)
                args.json.write_text(json.dumps(results, indent=1) + "\n")
    print(language_model_table(results), digits_table(results), sep="\n\n")


if __name__ == "__main__":
    main()
