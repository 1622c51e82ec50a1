"""An independent reading of the rules, one client at a time, in float64 and exact fractions: slow, and plain on purpose.

Shares no code with the package. Clients live in dictionaries; a federation is stepped round by round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction


@dataclass
class Client:
    examples: float
    n: int = 0
    pos: list[int] = field(default_factory=list)
    p: float = 0.0
    dp: float = 0.0
    w: float = 1.0


@dataclass
class Oracle:
    """FedHEAL over a model given as one list of parameters cut into tensors, with buffers and counters behind."""

    tensors: list[int]
    buffers: int = 0
    counters: int = 0
    tau: str = "0.3"
    beta: float = 0.4
    variant: str = "paper"
    fphl: bool = True
    fael: bool = True
    clients: dict[str, Client] = field(default_factory=dict)

    def step(self, model, cohort):
        """Return the new model (params, buffers, counters) and weights; cohort: {id: (delta, buffers, counters, examples)}."""
        names = sorted(cohort)
        self.enrol({name: cohort[name][3] for name in names})
        kept = {name: self.mask(name, self.list_signed_values(model, cohort[name])) for name in names}
        weights = self.weights(names, cohort, kept)
        total = sum(weights[name] for name in names)
        u = {name: weights[name] / total for name in names}
        params, buffers, counters = model
        G, B = len(params), len(buffers)
        new_params = self.average(params, names, u, {m: cohort[m][0] for m in names}, kept, 0)
        if self.variant == "paper":
            new_buffers = [sum(u[m] * float(cohort[m][1][i]) for m in names) for i in range(B)]
            new_counters = [max(int(cohort[m][2][i]) for m in names) for i in range(len(counters))]
        else:
            moves = {m: [float(x) - float(y) for x, y in zip(cohort[m][1], buffers, strict=True)] for m in names}
            new_buffers = self.average(buffers, names, u, moves, kept, G)
            steps = {m: [int(x) - int(y) for x, y in zip(cohort[m][2], counters, strict=True)] for m in names}
            new_counters = [
                self.average_counter(
                    int(c), names, u, {m: steps[m][i] for m in names}, {m: kept[m][G + B + i] for m in names}
                )
                for i, c in enumerate(counters)
            ]
        return (new_params, new_buffers, new_counters), u

    def enrol(self, examples):
        new = [name for name in examples if name not in self.clients]
        for name in new:
            self.clients[name] = Client(examples[name])
        everyone = sum(client.examples for client in self.clients.values())
        shares = {name: self.clients[name].examples / everyone for name in new}
        rest = 1 - sum(shares.values())
        for name, client in self.clients.items():
            client.p = shares[name] if name in shares else client.p * rest

    def list_signed_values(self, model, reply):
        """Return the update and, in the released variant, the changes of buffers and counters."""
        delta = [float(x) for x in reply[0]]
        if self.variant == "released":
            delta += [float(x) - float(y) for x, y in zip(reply[1], model[1], strict=True)]
            delta += [float(int(x) - int(y)) for x, y in zip(reply[2], model[2], strict=True)]
        return delta

    def mask(self, name, delta):
        client, tau = self.clients[name], Fraction(self.tau)
        client.pos = client.pos or [0] * len(delta)
        before = client.n
        client.n += 1
        up = [x >= 0 if self.variant == "paper" else x <= 0 for x in delta]
        if self.variant == "paper":
            client.pos = [c + int(g) for c, g in zip(client.pos, up, strict=True)]
            if not self.fphl or tau == 0:
                return [True] * len(delta)
            agree = [c if g else client.n - c for c, g in zip(client.pos, up, strict=True)]
            return [Fraction(a, client.n) >= tau for a in agree]
        agree = [c if g else before - c for c, g in zip(client.pos, up, strict=True)]
        client.pos = [c + int(g) for c, g in zip(client.pos, up, strict=True)]
        if not self.fphl or before == 0:
            return [True] * len(delta)
        return [Fraction(a, before) > tau for a in agree]

    def distance(self, delta, kept):
        if self.variant == "paper":
            return math.fsum(float(x) ** 2 for x, k in zip(delta, kept, strict=False) if k)
        total, start = 0.0, 0
        for length in self.tensors:
            part = zip(delta[start : start + length], kept[start : start + length], strict=True)
            total += math.sqrt(math.fsum(float(x) ** 2 for x, k in part if k))
            start += length
        return total

    def weights(self, names, cohort, kept):
        if not self.fael or (self.variant == "paper" and self.beta == 0):
            return {name: cohort[name][3] for name in names}
        d = {name: self.distance(cohort[name][0], kept[name]) for name in names}
        total, size = math.fsum(d.values()), len(names)
        for name in names:
            r = size * d[name] / total if total > 0 else 1.0
            client = self.clients[name]
            client.dp = (1 - self.beta) * client.dp + self.beta * r
        cohort_clients = [self.clients[name] for name in names]
        if self.variant == "released":
            for c in cohort_clients:
                c.w += c.dp
            return {
                name: self.clients[name].w
                / (1 + sum(1 - (1 - self.beta) ** k for k in range(1, self.clients[name].n + 1)))
                for name in names
            }
        warm = [1 - (1 - self.beta) ** c.n for c in cohort_clients]
        g = [sum(warm) / size * c.dp / b for c, b in zip(cohort_clients, warm, strict=True)]
        mass = sum(c.p for c in cohort_clients)
        v = [c.p / mass + x / size for c, x in zip(cohort_clients, g, strict=True)]
        for c, x in zip(cohort_clients, v, strict=True):
            c.p = mass * x / sum(v)
        return {name: self.clients[name].p for name in names}

    def average(self, before, names, u, moves, kept, offset):
        result = []
        for i, start in enumerate(before):
            present = [m for m in names if kept[m][offset + i]]
            den = sum(u[m] for m in present)
            result.append(float(start) + (sum(u[m] * float(moves[m][i]) for m in present) / den if den > 0 else 0.0))
        return result

    def average_counter(self, before, names, u, steps, kept):
        present = [m for m in names if kept[m]]
        if not present:
            return before
        mean = before + sum(Fraction(u[m]) * steps[m] for m in present) / sum(Fraction(u[m]) for m in present)
        # Weights are rounded, so a mean that should be whole may be a hair less.
        return round(mean) if abs(mean - round(mean)) < Fraction(1, 10**6) else math.trunc(mean)
