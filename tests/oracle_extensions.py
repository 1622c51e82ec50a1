"""An independent reading of FedHEAL's extensions, beside `oracle.py`: soft masks, counts that fade, weights per domain.

A mask is a number an entry, from 0 to 1; faded counts are exact fractions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

from oracle import Client, Oracle

TIE = Fraction(2, 10**5)


@dataclass
class ExtendedOracle(Oracle):
    """FedHEAL with soft masks, fading counts and weights per domain (`client_domains` gives each client's domain)."""

    soft: bool = False
    forget: str = "0"
    client_domains: dict[str, str] | None = None
    domains: dict[str, Client] = field(default_factory=dict)
    rounds: dict[str, int] = field(default_factory=dict)  # of each client or domain, whatever fades
    nearest: float = math.inf  # how near a consistency has come to where it is just kept

    def enrol(self, examples):
        new = [name for name in examples if name not in self.clients]
        super().enrol(examples)
        if self.client_domains is None:
            return
        everyone = sum(client.examples for client in self.clients.values())
        brought = sum(self.clients[name].examples for name in new) / everyone
        for domain in self.domains.values():
            domain.p *= 1 - brought
        for name in new:
            self.domains.setdefault(self.client_domains[name], Client(0)).p += self.clients[name].examples / everyone

    def mask(self, name, delta):
        client, tau = self.clients[name], Fraction(self.tau)
        decay, tie = 1 - Fraction(self.forget), TIE if float(self.forget) else Fraction(0)
        past = self.variant == "released"
        up = [x <= 0 if past else x >= 0 for x in delta]
        total, history = Fraction(client.n), [Fraction(c) for c in client.pos or [0] * len(delta)]
        client.n = decay * total + 1
        client.pos = [decay * c + int(g) for c, g in zip(history, up, strict=True)]
        if not past:
            total, history = client.n, client.pos
        if not self.fphl or total == 0:
            return [1] * len(delta)
        shares = [(c if g else total - c) / total for c, g in zip(history, up, strict=True)]
        edge = tau + tie if past else tau - tie
        self.nearest = min([self.nearest, *(abs(float(share - edge)) for share in shares)])
        kept = [share > edge if past else share >= edge for share in shares]
        return [k * (share if self.soft else 1) for k, share in zip(kept, shares, strict=True)]

    def distance(self, delta, kept):
        squares = [(float(k) * float(x)) ** 2 for x, k in zip(delta, kept, strict=False)]
        if self.variant == "paper":
            return math.fsum(squares)
        ends = [sum(self.tensors[: i + 1]) for i in range(len(self.tensors))]
        parts = zip(ends, self.tensors, strict=True)
        return sum(math.sqrt(math.fsum(squares[end - length : end])) for end, length in parts)

    def weights(self, names, cohort, kept):
        examples = {name: cohort[name][3] for name in names}
        if not self.fael or (self.variant == "paper" and self.beta == 0):
            return examples
        d = {name: self.distance(cohort[name][0], kept[name]) for name in names}
        if self.client_domains is None:
            return self.apply_momentum_rule({name: self.clients[name] for name in names}, d)
        here: dict[str, list[str]] = {}
        for name in names:
            here.setdefault(self.client_domains[name], []).append(name)
        means = {home: math.fsum(d[m] for m in members) / len(members) for home, members in here.items()}
        domain_weights = self.apply_momentum_rule({home: self.domains[home] for home in here}, means)
        within = {m: examples[m] / sum(examples[o] for o in members) for members in here.values() for m in members}
        return {name: domain_weights[self.client_domains[name]] * within[name] for name in names}

    def apply_momentum_rule(self, units, d):
        """Apply FAEL's momentum rule to clients or domains."""
        total, size, beta = math.fsum(d.values()), len(units), self.beta
        for name, unit in units.items():
            self.rounds[name] = self.rounds.get(name, 0) + 1
            unit.dp = (1 - beta) * unit.dp + beta * (size * d[name] / total if total > 0 else 1.0)
            unit.w += unit.dp
        if self.variant == "released":
            worth = {
                name: 1 + sum(1 - (1 - beta) ** k for k in range(1, self.rounds[name] + 1))
                for name, unit in units.items()
            }
            return {name: unit.w / worth[name] for name, unit in units.items()}
        warm = {name: 1 - (1 - beta) ** self.rounds[name] for name, unit in units.items()}
        mass, level = sum(unit.p for unit in units.values()), sum(warm.values()) / size
        v = {name: unit.p / mass + level * unit.dp / warm[name] / size for name, unit in units.items()}
        for name, unit in units.items():
            unit.p = mass * v[name] / sum(v.values())
        return {name: unit.p for name, unit in units.items()}

    def average(self, before, names, u, moves, kept, offset):
        result = []
        for i, start in enumerate(before):
            shares = {m: u[m] * float(kept[m][offset + i]) for m in names}
            den = sum(shares.values())
            result.append(float(start) + (sum(shares[m] * float(moves[m][i]) for m in names) / den if den > 0 else 0.0))
        return result

    def average_counter(self, before, names, u, steps, kept):
        shares = {m: Fraction(u[m]) * Fraction(kept[m]) for m in names}
        if not sum(shares.values()):
            return before
        mean = before + sum(shares[m] * steps[m] for m in names) / sum(shares.values())
        return round(mean) if abs(mean - round(mean)) < Fraction(1, 10**6) else math.trunc(mean)
