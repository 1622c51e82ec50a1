"""Colours that people with any colour vision can distinguish, the same for a domain in every figure.

Domains take those of Okabe and Ito (2008), methods those of Tol's "muted" set; both have lighter twins for dark pages.
"""

from __future__ import annotations

DOMAINS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5195", "#6B6B6B")
DOMAINS_DARK = ("#5AB0E8", "#F2894A", "#33C79B", "#E3A3C6", "#F3BE55", "#9AD4F5", "#B79AD6", "#B5B5B5")
METHODS = ("#332288", "#CC6677", "#117733", "#88CCEE", "#AA4499", "#999933", "#882255", "#44AA99", "#DDAA33", "#777777")
METHODS_DARK = (
    "#A7A1E8", "#F29BA8", "#6CC788", "#A6DDF5", "#DB8ED0", "#CFCF6A", "#D987A8", "#7FD6C8", "#F0CB6E", "#B8B8B8"
)  # fmt: skip
BY_USE = {"domains": DOMAINS, "domainsDark": DOMAINS_DARK, "methods": METHODS, "methodsDark": METHODS_DARK}


def domain_colour(number: int) -> str:
    """Return the colour of the domain with this number in its data set; colours repeat after eight."""
    return DOMAINS[number % len(DOMAINS)]


def method_colour(number: int) -> str:
    """Return the colour of the method with this number; colours repeat after ten."""
    return METHODS[number % len(METHODS)]
