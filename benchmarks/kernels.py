"""Sum the time of a round's GPU kernels by kind: with one lane, with several lanes, and as one program.

    python benchmarks/kernels.py                             # the Digits protocol in bf16: 1 and 8 lanes, and a cohort
    python benchmarks/kernels.py --protocol office --engines 1,7 --precision tf32

With one lane, and in a cohort, one kernel follows another: their sum is the time they need. With several lanes kernels run
side by side and each takes longer, so the sum exceeds the round. Compare the round then with the sum of one lane.
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
from simulate import PROTOCOLS, make_domains

# The kinds of our own kernels, by their whole names. They are in files such as models/_stacked_cuda.py.
OWN_KERNELS = {
    **dict.fromkeys(("find_moments", "statistics_of_moments", "apply_norm", "gradient_sums"), "normalisation"),
    **dict.fromkeys(("reduce_sums", "norm_input_gradient"), "normalisation"),
    **dict.fromkeys(("convolve", "input_gradient_of_stride_2", "weight_gradient", "add_chunks"), "convolutions"),
    **dict.fromkeys(("multiply_boxes", "input_gradient_of_halves", "weight_gradient_of_boxes"), "convolutions"),
    **dict.fromkeys(("scale_to_half", "turn"), "copies and casts"),
    **dict.fromkeys(("pool_windows", "spread_gradient", "gather_examples"), "everything else"),
    **dict.fromkeys(("average_cross_entropy", "scale_gradients", "linear_gradients"), "everything else"),
    "take_sgd_step": "optimiser and other kernels over lists",
}
# Other kernels are of the first kind with a word that is in the kernel's name.
KINDS = {
    "normalisation": ("batch_norm",),
    "convolutions": ("fprop", "dgrad", "wgrad", "convol", "cudnn"),
    "optimiser and other kernels over lists": ("multi_tensor", "FusedSgd"),
    "copies and casts": ("copy", "Memcpy", "Memset", "CatArray"),
}
OTHER = "everything else"


def find_kind(name: str) -> str:
    """Return the kind of a kernel."""
    if name in OWN_KERNELS:
        return OWN_KERNELS[name]
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), OTHER)


def profile_round(
    federation: Federation, engine_name: str, deterministic: bool
) -> tuple[float, Counter[str], Counter[str]]:
    """Return the seconds of a round, and by kind the seconds and the number of its kernels."""
    local_training, lanes = federation.local_training, None if engine_name == "cohort" else int(engine_name)
    with (
        use_precision(local_training.precision, deterministic, local_training.device),
        open_engine(local_training, "lanes" if lanes else "cohort", lanes=lanes) as engine,
    ):
        state = initial_state(federation)
        for _ in range(3):
            state, record = run_round(federation, state, engine)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            state, _ = run_round(federation, state, engine)
            torch.cuda.synchronize()
    seconds, counts = Counter[str](), Counter[str]()
    for event in profile.key_averages():
        seconds[find_kind(event.key)] += event.self_device_time_total / 1e6
        counts[find_kind(event.key)] += event.count
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
    experiment = Experiment.of({"method": options.method, "device": "cuda", **protocol.fields})
    federation = build_federation(experiment, make_domains(protocol), device)
    federation = replace(federation, local_training=replace(federation.local_training, precision=options.precision))
    print(f"{date.today()} {torch.cuda.get_device_name()}, torch {torch.__version__}, ", end="")
    print(f"Python {platform.python_version()}, {options.protocol}, {options.method}, {options.precision}\n")
    kinds = [*KINDS, OTHER]
    print(f"| lanes or cohort | s a round | kernels, s | {' | '.join(kinds)} | kernels a round |")
    print("|---" * (len(kinds) + 4) + "|")
    for name in options.engines.split(","):
        round_seconds, seconds, counts = profile_round(federation, name, options.deterministic)
        cells = " | ".join(f"{seconds[kind]:.3f}" for kind in kinds)
        print(f"| {name} | {round_seconds:.3f} | {seconds.total():.3f} | {cells} | {counts.total():,} |", flush=True)


if __name__ == "__main__":
    main()
