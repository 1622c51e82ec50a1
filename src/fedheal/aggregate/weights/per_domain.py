"""FAEL between domains, where it is known which domain a client belongs to. An extension.

A domain with many clients has many voices in FAEL's rule, one with a single client has one. Here the rule of `distance.py` is
applied to domains: a domain's distance is the mean over its clients in the cohort, weight moves between domains, and what a
domain holds is shared among its clients in the cohort in proportion to this round's examples. With one client a domain that
is FAEL itself.

Who is there. A domain takes part in a round when one of its clients does, and counts in full by those who came; domains of
which nobody came keep their weight and momentum, also for good. A client that joins brings its share of the examples of all
clients ever seen to its domain, and everyone else makes room, as in FAEL; in the released rule a domain starts at 1 when its
first client comes. A client belongs to the domain that it named first, as it has the examples that it had first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from fedheal.aggregate.draft import Draft
from fedheal.aggregate.stage import Stage
from fedheal.aggregate.weights.distance import Rule, told
from fedheal.core.arrays import normalised
from fedheal.core.state import Arrays, Json, State, expect, kind, nested, unnested


@kind("per-domain")
@dataclass(frozen=True)
class PerDomainState(State):
    """The domain of every client ever seen, and what the rule remembers of domains."""

    clients: tuple[str, ...]
    domains: tuple[str, ...]
    rule: State

    def _write(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        arrays, json = nested({"rule": self.rule})
        return arrays, {"clients": list(self.clients), "domains": list(self.domains), **json}

    @classmethod
    def _read(cls, arrays: Arrays, json: Json) -> PerDomainState:
        clients, domains = tuple(json["clients"]), tuple(json["domains"])
        if len(clients) != len(domains):
            raise ValueError(f"the domains of {len(domains)} clients do not belong to {len(clients)} clients")
        return cls(clients, domains, unnested("rule", arrays, json))


def by_domain(rule: Rule) -> Stage:
    """The rule over domains; needs each client's domain."""

    def apply(draft: Draft, state: State) -> tuple[Draft, State]:
        before = expect(state, PerDomainState)
        known = dict(zip(before.clients, before.domains, strict=True))
        client_domains = known | {
            c: home for c, home in zip(draft.clients, draft.domains, strict=True) if c not in known
        }
        here = np.array([client_domains[client] for client in draft.clients], object)
        units = tuple(sorted(set(here)))
        new = np.array([client not in known for client in draft.clients])
        examples, d = draft.num_examples, rule.distance(draft)
        joined = np.array([examples[new & (here == unit)].sum() for unit in units])
        means = np.array([d[here == unit].mean() for unit in units])
        held, after = rule.follow(before.rule, units, joined, means)
        weights = np.zeros(len(here))
        for unit, weight in zip(units, held, strict=True):
            weights[here == unit] = weight * normalised(examples[here == unit])
        shares = dict(zip(units, normalised(held).tolist(), strict=True))
        report = dict(draft.report) | told(draft, d) | {"domain_weights": shares}
        state = PerDomainState(tuple(client_domains), tuple(client_domains.values()), after)
        return replace(draft, weights=weights, report=report), state

    return Stage(lambda layout: PerDomainState((), (), rule.start), apply, rule.needs | {"domain"})
