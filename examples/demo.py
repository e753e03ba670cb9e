"""The same small GPT trained twice, dense and compressed, each on 2 nodes of 2 ranks; ends with a comparison.

    make demo
    python -m examples.demo --steps 800
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from examples.launch import RANKS, ROOT, JobError, launch

JOBS = {"dense": "configs/dense.json", "compressed": "configs/mstopk_zero1.json"}


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps of each run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "demo", help="folder of the two results")
    parser.add_argument("--compressed", default=JOBS["compressed"], metavar="CONFIG", help="(default: %(default)s)")
    return parser.parse_args()


def run(name: str, config: str, args: argparse.Namespace) -> dict[str, Any]:
    """One launcher job, its output passed on; returns its result, or ends the demo with the job's exit status."""
    command = ["examples/train_lm.py", "--deepspeed_config", config]
    command += ["--steps", str(args.steps), "--seed", str(args.seed)]
    try:
        return launch(command, args.output / f"{name}.json")
    except JobError as error:
        print(f"\nThe {name} run failed with exit status {error.status}; its last lines are above.", file=sys.stderr)
        sys.exit(error.status or 1)


def megabytes(count: float) -> str:
    """A readable number of bytes."""
    return f"{count / 1e6:,.2f} MB"


def quotient(dense: float, sent: float) -> str:
    """How many times more dense would have sent."""
    return f"{dense / sent:.1f}x" if sent else "-"


def comparison(dense: dict[str, Any], compressed: dict[str, Any]) -> str:
    """The closing table."""
    phase = compressed["compressed_phase"]
    gap = 100 * (compressed["validation_loss"] / dense["validation_loss"] - 1)
    per_step = dense["inter_node_bytes"] / dense["steps"], phase["inter_node_bytes"] / max(1, phase["steps"])
    rows = [
        ("", "dense", "compressed"),
        ("validation loss", f"{dense['validation_loss']:.4f}", f"{compressed['validation_loss']:.4f} ({gap:+.2f} %)"),
        ("bytes across nodes", *(megabytes(r["inter_node_bytes"]) for r in (dense, compressed))),
        ("dense/wire, whole run", "1.0x", quotient(compressed["dense_bytes"], compressed["inter_node_bytes"])),
        ("steps, of them compressed", f"{dense['steps']}, 0", f"{compressed['steps']}, {phase['steps']}"),
        ("bytes per step, compressed phase", *map(megabytes, per_step)),
        ("dense/wire, compressed phase", "1.0x", quotient(phase["dense_bytes"], phase["inter_node_bytes"])),
        ("seconds of training", f"{dense['seconds']:.1f}", f"{compressed['seconds']:.1f}"),
        ("seconds with launch", f"{dense['wall_seconds']:.1f}", f"{compressed['wall_seconds']:.1f}"),
    ]
    return "\n".join(f"{label:<34}{left:>16}{right:>24}" for label, left, right in rows)


def main() -> None:
    """Both runs, then the table."""
    args = parse_arguments()
    args.output = args.output.resolve()
    dense = run("dense", JOBS["dense"], args)
    compressed = run("compressed", args.compressed, args)
    print(f"\n{compressed['parameters']:,} parameters, {RANKS} ranks as 2 nodes of 2, {args.steps} steps\n")
    print(comparison(dense, compressed))
    print(
        "\nBoth runs share this machine's memory, so there is no slow link here that compression could save time on;"
        "\nwhat carries over to a real cluster is the loss and the bytes. Curves of both runs:"
        f"\n\n    {Path(sys.executable).parent / 'tensorboard'} --logdir {ROOT / 'runs'}"
    )


if __name__ == "__main__":
    main()
