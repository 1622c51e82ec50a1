"""Where a round's time goes on a GPU: seconds of its kernels by kind, with one lane, with several, and as one program.

    python benchmarks/kernels.py                             # the Digits protocol in bf16: 1 and 8 lanes, and a cohort
    python benchmarks/kernels.py --protocol office --engines 1,7 --precision tf32

With one lane, and in a cohort, kernels follow each other, and their sum is the time that they need. With several lanes they run
side by side and each takes longer, so that the sum is more than the round: what counts is how far the round has come down to
the sum over one lane.
"""

from __future__ import annotations

import argparse
import platform
from collections import Counter
from dataclasses import replace
from datetime import date

import torch

from arguments import exit_with_error
from fedheal.engine import open_engine
from fedheal.engine.precision import use_precision
from fedheal.simulate.build import build_federation
from fedheal.simulate.experiment import Experiment
from fedheal.simulate.federation import Federation
from fedheal.simulate.round import initial_state, run_round
from simulate import PROTOCOLS, load_domains

# Our own kernels, by their whole names: those of all files with names like models/_stacked_cuda.py.
OURS = {
    **dict.fromkeys(("find_moments", "statistics_of_moments", "apply_norm", "gradient_sums"), "normalisation"),
    **dict.fromkeys(("reduce_sums", "norm_input_gradient"), "normalisation"),
    **dict.fromkeys(("convolve", "input_gradient_of_stride_2", "weight_gradient"), "convolutions"),
    **dict.fromkeys(("multiply_boxes", "input_gradient_of_halves", "weight_gradient_of_boxes"), "convolutions"),
    **dict.fromkeys(("scale_to_half", "turn"), "copies and casts"),
    **dict.fromkeys(("pool_windows", "spread_gradient", "gather_examples"), "everything else"),
    **dict.fromkeys(("average_cross_entropy", "scale_gradients", "linear_gradients"), "everything else"),
    "take_sgd_step": "optimiser and other kernels over lists",
}
# The kind of any other kernel is the first with a word that is in the kernel's name.
KINDS = {
    "normalisation": ("batch_norm",),
    "convolutions": ("fprop", "dgrad", "wgrad", "convol", "cudnn"),
    "optimiser and other kernels over lists": ("multi_tensor", "FusedSgd"),
    "copies and casts": ("copy", "Memcpy", "Memset", "CatArray"),
}
REST = "everything else"


def kind_of(name: str) -> str:
    if name in OURS:
        return OURS[name]
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), REST)


def profile_round(fed: Federation, name: str, deterministic: bool) -> tuple[float, Counter[str], Counter[str]]:
    """Return the seconds of a round, and by kind the seconds and the number of its kernels."""
    local_training, lanes = fed.local_training, None if name == "cohort" else int(name)
    with (
        use_precision(local_training.precision, deterministic, local_training.device),
        open_engine(local_training, "lanes" if lanes else "cohort", lanes=lanes) as engine,
    ):
        state = initial_state(fed)
        for _ in range(3):
            state, record = run_round(fed, state, engine)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            state, _ = run_round(fed, state, engine)
            torch.cuda.synchronize()
    seconds, counts = Counter[str](), Counter[str]()
    for event in profile.key_averages():
        seconds[kind_of(event.key)] += event.self_device_time_total / 1e6
        counts[kind_of(event.key)] += event.count
    return sum(record.seconds.values()), seconds, counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--protocol", choices=sorted(PROTOCOLS), default="digits")
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--precision", choices=["fp32", "tf32", "bf16"], default="bf16")
    parser.add_argument("--engines", default="1,8,cohort", help="numbers of lanes, and cohort")
    parser.add_argument("--deterministic", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        exit_with_error("no GPU is available, and this benchmark measures the kernels of one")
    device, protocol = torch.device("cuda"), PROTOCOLS[options.protocol]
    experiment = Experiment.of({"method": options.method, "device": "cuda", **protocol.keys})
    fed = build_federation(experiment, load_domains(protocol), device)
    fed = replace(fed, local_training=replace(fed.local_training, precision=options.precision))
    print(f"{date.today()} {torch.cuda.get_device_name()}, torch {torch.__version__}, ", end="")
    print(f"Python {platform.python_version()}, {options.protocol}, {options.method}, {options.precision}\n")
    kinds = [*KINDS, REST]
    print(f"| lanes or cohort | s a round | kernels, s | {' | '.join(kinds)} | kernels a round |")
    print("|---" * (len(kinds) + 4) + "|")
    for name in options.engines.split(","):
        whole, seconds, counts = profile_round(fed, name, options.deterministic)
        cells = " | ".join(f"{seconds[kind]:.3f}" for kind in kinds)
        print(f"| {name} | {whole:.3f} | {seconds.total():.3f} | {cells} | {counts.total():,} |", flush=True)


if __name__ == "__main__":
    main()
