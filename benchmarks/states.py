"""Training with compact and bf16 states against fp32 states: the main job's model, its text, several seeds.

    python benchmarks/states.py [--quick] [--steps N] [--seeds N] [--out DIR] [--json FILE]

Each run is `zero-offload train` with its states in memory, and goes on where it was stopped. The seed decides weights
and batches, so runs of one seed differ by the format alone. Reach: the mean of the final validation losses is no
further from that of fp32 states than the spread of these over seeds (their standard deviation); with one seed the
spread is not known, and nothing is claimed. `--quick` is one seed of 150 steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from _rows import missing, row, show, write

from zero_offload.config import OffloadConfig, Precision
from zero_offload.recipes.settings import TrainConfig
from zero_offload.recipes.train import train

FORMATS = ("fp32", "bf16", "compact")


def final_loss(states: str, seed: int, steps: int, out: Path) -> float:
    """Validation loss, nats per byte, after the last step."""
    done = out / "loss.json"
    if not done.exists():
        precision = Precision(compute="bf16", states=states)
        # A generation now and then, so that a run that was stopped goes on.
        config = OffloadConfig(params="cpu", optimizer="cpu", nvme=out / "nvme", precision=precision, commit_every=100)
        with (out.parent / f"{out.name}.log").open("a") as log:
            job = TrainConfig(out=out, steps=steps, seed=seed, eval_every=steps, eval_batches=64, offload=config)
            loss = train(job, stream=log).validation_loss
        if loss is None:
            raise SystemExit(f"stopped; the same command goes on: {out}")
        done.write_text(json.dumps(loss))
    return float(json.loads(done.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/states"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    steps, seeds = (150, 1) if args.quick else (args.steps, args.seeds)
    losses: dict[str, list[float]] = {states: [] for states in FORMATS}
    for seed in range(seeds):
        for states in FORMATS:
            out = args.out / f"{states}-{seed}-{steps}"
            out.parent.mkdir(parents=True, exist_ok=True)
            losses[states].append(final_loss(states, seed, steps, out))
            print(f"seed {seed}, {states:<8} {losses[states][-1]:.4f} nats per byte after {steps} steps", flush=True)
    spread = statistics.stdev(losses["fp32"]) if seeds > 1 else 0.0
    rows = []
    for states in FORMATS[1:]:
        apart = statistics.mean(losses[states]) - statistics.mean(losses["fp32"])
        name, against = f"{states} states, {steps} steps", f"spread of fp32 over {seeds} seeds"
        if spread:
            rows.append(row(name, abs(apart), "nat", against, spread, 1.0))
        else:
            rows.append(missing(name, abs(apart), "nat", against, 1.0))
    show(rows)
    write(rows, args.json)


if __name__ == "__main__":
    main()
