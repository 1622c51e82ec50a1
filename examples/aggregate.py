"""FedHEAL's aggregation on a toy federation: three sites, one of which keeps being outvoted.

Each site pulls the shared parameters towards its own optimum, a large hospital hardest by its number of examples.
Watch the weights move to the site that has to travel furthest, and what that does to its distance. The second part trains
a network with batch normalisation, whose running statistics are no parameters: `Updates.from_modules` carries them.
"""

import copy

import torch
from torch import nn

from fedheal import Layout, Updates, aggregate

SITES = ["city hospital", "clinic", "rural practice"]
EXAMPLES = [8000, 1500, 500]


def final_distances(aggregator: aggregate.Aggregator, rounds: int = 30) -> tuple[list[float], list[float], float]:
    """Distance of the global model to each site's optimum, the last weights, and how much of the updates was kept."""
    generator = torch.Generator().manual_seed(0)
    optimum = torch.randn(len(SITES), 1000, generator=generator) + torch.tensor([[0.0], [0.3], [1.5]])
    model = torch.zeros(1000)
    state = aggregator.init(Layout.flat(1000))
    for _ in range(rounds):
        noise = 0.3 * torch.randn(len(SITES), 1000, generator=generator)
        deltas = 0.2 * (optimum - model) + noise  # what local training would send: local model minus global model
        out = aggregator.apply(model, Updates(SITES, deltas, EXAMPLES), state)
        model, state = out.model, out.state
    kept = out.report.get("kept", {"all": 1.0}).values()
    return (optimum - model).norm(dim=1).tolist(), out.weights.tolist(), sum(kept) / len(kept)


def train_network(aggregator: aggregate.Aggregator, rounds: int = 5) -> nn.Module:
    """Train one network over the sites' own data, which lie around different means."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
    layout = Layout.of(module)
    state = aggregator.init(layout)
    for _ in range(rounds):
        trained = {}
        for i, site in enumerate(SITES):
            own, x = copy.deepcopy(module), torch.randn(64, 8) + i
            optimiser = torch.optim.SGD(own.parameters(), lr=0.1)
            for _ in range(5):
                optimiser.zero_grad()
                nn.functional.cross_entropy(own(x), (x[:, 0] > i).long()).backward()
                optimiser.step()
            trained[site] = own, EXAMPLES[i]
        out = aggregator.apply(layout.pack(module.state_dict()), Updates.from_modules(module, trained), state)
        state = out.state
        module.load_state_dict(layout.unpack(out.model))
    return module.eval()


def main() -> None:
    methods = {"FedAvg": aggregate.fedavg(), "uniform": aggregate.uniform(), "FedHEAL": aggregate.fedheal()}
    print("Distance of the global model to each site's own optimum after 30 rounds (and the site's last weight)\n")
    print(f"{'':10}" + "".join(f"{site:>22}" for site in SITES) + f"{'entries kept':>16}")
    for name, aggregator in methods.items():
        distances, weights, kept = final_distances(aggregator)
        cells = "".join(f"{d:13.1f} (w {w:.3f})" for d, w in zip(distances, weights, strict=True))
        print(f"{name:10}{cells}{kept:15.0%}")
    print("\nAccuracy of a network with batch normalisation on each site, after 5 rounds\n")
    for name, aggregator in methods.items():
        module = train_network(aggregator)
        inputs = [torch.randn(1000, 8, generator=torch.Generator().manual_seed(1)) + i for i in range(len(SITES))]
        right = [(module(x).argmax(1) == (x[:, 0] > i)).double().mean().item() for i, x in enumerate(inputs)]
        print(f"{name:10}" + "".join(f"{share:22.1%}" for share in right))


if __name__ == "__main__":
    main()
