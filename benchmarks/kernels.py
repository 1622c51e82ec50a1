"""Where a round's time goes on a GPU: seconds of its kernels by kind, with one lane and with several.

    python benchmarks/kernels.py                             # the Digits protocol in bf16, 1 and 8 lanes
    python benchmarks/kernels.py --protocol office --lanes 1,7 --precision tf32

With one lane kernels follow each other, and their sum is the time that they need. With several they run side by side and each
takes longer, so that the sum is more than the round: what counts is how far the round has come down to the sum over one lane.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections import Counter
from dataclasses import replace
from datetime import date

import torch

from fedheal.engine import trainer
from fedheal.engine.precision import numerics
from fedheal.simulate.build import build_federation
from fedheal.simulate.experiment import Experiment
from fedheal.simulate.federation import Federation
from fedheal.simulate.round import initial_state, run_round
from simulate import PROTOCOLS, load_domains

OURS = {
    "_moments",
    "_statistics",
    "_apply",
    "_sums",
    "_totals",
    "_pull",
}  # of models/_fused_cuda.py, by their whole names
# Of the others, the first whose word is in a kernel's name.
KINDS = {
    "normalisation": ("batch_norm",),
    "convolutions": ("fprop", "dgrad", "wgrad", "convol", "cudnn"),
    "optimiser and other kernels over lists": ("multi_tensor", "FusedSgd"),
    "copies and casts": ("copy", "Memcpy", "Memset", "CatArray"),
}
REST = "everything else"


def kind_of(name: str) -> str:
    if name in OURS:
        return "normalisation"
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), REST)


def profiled(fed: Federation, lanes: int, deterministic: bool) -> tuple[float, Counter[str], Counter[str]]:
    """Seconds of a round, and by kind the seconds of its kernels and how many there are."""
    local_training = fed.local_training
    with (
        numerics(local_training.precision, deterministic, local_training.device),
        trainer(local_training, "lanes", lanes=lanes) as train,
    ):
        state = initial_state(fed)
        for _ in range(3):
            state, record = run_round(fed, state, train)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            state, _ = run_round(fed, state, train)
            torch.cuda.synchronize()
    seconds, number = Counter[str](), Counter[str]()
    for event in seen.key_averages():
        seconds[kind_of(event.key)] += event.self_device_time_total / 1e6
        number[kind_of(event.key)] += event.count
    return sum(record.seconds.values()), seconds, number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--protocol", choices=sorted(PROTOCOLS), default="digits")
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--precision", choices=["fp32", "tf32", "bf16"], default="bf16")
    parser.add_argument("--lanes", default="1,8")
    parser.add_argument("--deterministic", action="store_true")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        print("kernels.py: there is no GPU here, and kernels are a GPU's", file=sys.stderr)
        sys.exit(2)
    device, protocol = torch.device("cuda"), PROTOCOLS[asked.protocol]
    experiment = Experiment.of({"method": asked.method, "device": "cuda", **protocol.keys})
    fed = build_federation(experiment, load_domains(protocol), device)
    fed = replace(fed, local_training=replace(fed.local_training, precision=asked.precision))
    print(f"{date.today()} {torch.cuda.get_device_name()}, torch {torch.__version__}, ", end="")
    print(f"Python {platform.python_version()}, {asked.protocol}, {asked.method}, {asked.precision}\n")
    kinds = [*KINDS, REST]
    print(f"| lanes | s a round | kernels, s | {' | '.join(kinds)} | kernels a round |")
    print("|---" * (len(kinds) + 4) + "|")
    for lanes in map(int, asked.lanes.split(",")):
        whole, seconds, number = profiled(fed, lanes, asked.deterministic)
        cells = " | ".join(f"{seconds[kind]:.3f}" for kind in kinds)
        print(f"| {lanes} | {whole:.3f} | {seconds.total():.3f} | {cells} | {number.total():,} |", flush=True)


if __name__ == "__main__":
    main()
