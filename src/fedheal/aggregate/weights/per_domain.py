"""FAEL between domains, where it is known which domain a client belongs to. An extension.

The rule of `distance.py` is applied to domains. A domain's distance is the mean over its clients in the cohort. Its
weight is shared among them in proportion to this round's examples. With one client per domain this is FAEL itself.

A domain takes part in a round, with its full weight, if one of its clients does. Otherwise it keeps its weight and
momentum. A newcomer brings its share of the examples of all clients ever seen to its domain, and the other domains
shrink, as in FAEL. In the released rule a domain starts at 1 with its first client. A client's domain and number of
examples are those it named first.
"""

from dataclasses import dataclass, replace

import numpy as np

from fedheal.aggregate.draft import Draft
from fedheal.aggregate.stage import Stage
from fedheal.aggregate.weights.distance import Rule
from fedheal.core.arrays import normalise_weights
from fedheal.core.state import State, expect


@dataclass(frozen=True)
class PerDomainState(State, kind="per-domain"):
    """The domain of every client ever seen, and what the rule remembers of domains."""

    clients: tuple[str, ...]
    domains: tuple[str, ...]
    rule: State


def per_domain_weights(rule: Rule) -> Stage:
    """Return the stage that applies a rule to domains; it needs each client's domain."""

    def apply(draft: Draft, state: State) -> tuple[Draft, State]:
        before = expect(state, PerDomainState)
        known = dict(zip(before.clients, before.domains, strict=True))
        client_domains = dict(known)
        for client, domain in zip(draft.clients, draft.domains, strict=True):
            client_domains.setdefault(client, domain)
        cohort = np.array([client_domains[client] for client in draft.clients], object)
        domains = tuple(sorted(set(cohort)))
        new = np.array([client not in known for client in draft.clients])
        examples, d = draft.num_examples, rule.measure(draft)
        joined = np.array([examples[new & (cohort == domain)].sum() for domain in domains])
        means = np.array([d[cohort == domain].mean() for domain in domains])
        domain_weights, after = rule.update(before.rule, domains, joined, means)
        weights = np.zeros(len(cohort))
        for domain, weight in zip(domains, domain_weights, strict=True):
            weights[cohort == domain] = weight * normalise_weights(examples[cohort == domain])
        shares = dict(zip(domains, normalise_weights(domain_weights).tolist(), strict=True))
        report = {**draft.report, "distance": draft.key_by_client(d), "domain_weights": shares}
        state = PerDomainState(tuple(client_domains), tuple(client_domains.values()), after)
        return replace(draft, weights=weights, report=report), state

    return Stage(lambda layout: PerDomainState((), (), rule.start), apply, rule.needs | {"domain"})
