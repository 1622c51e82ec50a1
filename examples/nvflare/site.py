"""A site: trains on its own digits and evaluates the model on its own test digits."""

import argparse

import nvflare.client as flare
from digits import describe_experiment, get_test_digits, load_federation

from fedheal.nvflare.client import evaluate_site, train_site


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", default="fedheal")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int)
    experiment = describe_experiment(**vars(parser.parse_args()))
    flare.init()
    site, federation = flare.get_site_name(), load_federation(experiment)
    local_training, domain = federation.local_training, federation.client_domains[site]
    while flare.is_running():
        received = flare.receive()
        if received is None:
            break
        if flare.is_evaluate():
            test = get_test_digits(federation, site)
            flare.send(evaluate_site(received, local_training, test, domain=domain))
        else:
            flare.send(train_site(received, local_training, site, domain=domain))


if __name__ == "__main__":
    main()
