"""Build a federation from an experiment: its data, clients, model and method on a device."""

import warnings
from collections.abc import Mapping
from dataclasses import fields, replace
from inspect import isfunction
from typing import Any

import torch
from torch import nn

from fedheal import data as datasets
from fedheal import models
from fedheal.aggregate.server_optimizer import Server
from fedheal.core.errors import name_if_custom, name_part, suggest
from fedheal.core.layout import Layout
from fedheal.core.rng import derive
from fedheal.data.augment import normalise_images
from fedheal.data.domains import Domains, Split
from fedheal.data.on_disk import multiply_fraction
from fedheal.data.partition import Client, partition_samples
from fedheal.engine.precision import resolve_precision
from fedheal.engine.serial import LocalTraining, Training, find_smallest_batch_size, use_seed
from fedheal.local.term import Term
from fedheal.methods import Method
from fedheal.methods.server_step import resolve_server
from fedheal.simulate.experiment import Experiment
from fedheal.simulate.federation import Federation
from fedheal.simulate.model_checks import check_evaluates, check_model, check_trains
from fedheal.simulate.objects import check_is_name
from fedheal.simulate.public_images import select_public_images


def make_data_request(experiment: Experiment) -> datasets.DataRequest:
    """Return which data the experiment asks for."""
    e = experiment
    return datasets.DataRequest(e.data_root, e.allow_missing, e.classes, e.image_size)


def load_domains(experiment: Experiment) -> Domains:
    """Load the experiment's data set, unless it was given as an object."""
    given = experiment.data_object
    if given is not None:
        if experiment.image_size is not None:
            problem = f"image_size = {experiment.image_size}: the images of '{experiment.data}' are not resized"
            raise ValueError(f"{problem}; leave it out, or resize them in your Domains")
        return given.domains
    check_is_name("data", experiment.data)
    return datasets.load_dataset(experiment.data, make_data_request(experiment))


def build_federation(experiment: Experiment, domains: Domains, device: torch.device) -> Federation:
    """Build the experiment's parts on a device; raise ValueError if its method, model and data do not fit each other."""
    for domain in domains.domains:
        if not len(domain.test):
            raise ValueError(
                f"domain '{domain.name}' of '{experiment.data}' has no test examples to evaluate a model with"
            )
    check_method(experiment)
    clients = partition_clients(experiment, domains)
    shape = tuple(domains.domains[0].test.images.shape[1:])
    module = build_module(experiment, len(domains.classes), shape).to(device)
    if device.type == "cuda":
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    check_features(experiment, module)
    method = experiment.resolved_method
    settings = vars(experiment) | dict(method.training)  # a method may ask for its own momentum and weight decay
    training = Training(**{field.name: settings[field.name] for field in fields(Training)})
    train, held_out = _split_examples(experiment, domains, clients, device)
    validation = held_out
    if any(term.validates for term in method.local):
        validation, held_out = _halve_splits(experiment, held_out)
    check_model(module, experiment.model)
    local_training = LocalTraining(
        module=module,
        layout=Layout.of(module),
        training=training,
        seed=experiment.get_seed("batch"),
        device=device,
        examples=train,
        classes=len(domains.classes),
        rounds=experiment.rounds,
        terms=method.local,
        received_loss="loss" in method.aggregator.stage.needs,
        validation=validation,
        precision=resolve_precision(experiment.precision, device),
        public=select_public_images(experiment, domains, clients, device),
    )
    _try_model(experiment.model, local_training, domains)
    return Federation(
        local_training=local_training,
        clients=tuple(train),
        aggregator=replace(method.aggregator, on_bad_update=experiment.on_bad_update),
        server=build_server_optimizer(experiment),
        tests={d.name: _move_split(d.test, device) for d in domains.domains},
        client_domains={client.id: client.domain for client in clients},
        validation=held_out,
        participation=experiment.participation,
        dropout=experiment.dropout,
    )


def build_module(experiment: Experiment, classes: int, shape: tuple[int, ...] | None = None) -> nn.Module:
    """Build the experiment's model with its initial values; `shape` is that of an image."""
    keys = {} if experiment.width is None else {"width": experiment.width}
    given = experiment.model_object
    with use_seed(derive(experiment.get_seed("init"), "model"), torch.device("cpu")):
        if given is not None:
            if experiment.weights is not None:
                raise ValueError(
                    f"weights = {experiment.weights!r}: the model is an object; load them into it yourself"
                )
            return given.build(classes, shape, **keys)
        check_is_name("model", experiment.model)
        return models.build(experiment.model, classes, experiment.weights, shape, **keys)


def build_server_optimizer(experiment: Experiment) -> Server:
    """Build the experiment's server optimiser."""
    e = experiment
    return Server(e.server_optimizer, e.server_lr, e.server_momentum, e.server_beta2, e.server_eps)


def check_method(experiment: Experiment) -> None:
    """Raise ValueError if the experiment lacks something that its method needs, whatever the data."""
    method = experiment.resolved_method
    resolve_server(method, build_server_optimizer(experiment))
    if experiment.optimizer != "sgd":
        needs = [term.needs_sgd for term in method.local if term.needs_sgd]
        if {"lr", "reach"} & method.aggregator.stage.needs:
            needs.append("its weights depend on the effective step of SGD")
        if needs:
            raise ValueError(
                f"optimizer = '{experiment.optimizer}' with method '{method.name}': {needs[0]}; use optimizer=sgd"
            )
    if experiment.pool and method.personalised:
        raise ValueError(f"method '{method.name}' keeps a part of the model with each client: pool=true leaves none")
    if any(term.validates for term in method.local) and (not experiment.validation or experiment.pool):
        raise ValueError(
            f"method '{method.name}' needs examples held out of each client's training data: give validation=0.2"
        )


def warn_of_idle_terms(method: Method) -> None:
    """Warn of each term that overrides no hook, often because the name of one is misspelt."""
    hooks = [name for name, value in vars(Term).items() if isfunction(value) and not name.startswith("_")]
    for term in method.local:
        kinds = [kind for kind in type(term).mro() if kind not in (Term, object)]
        own = {name for holder in (term, *kinds) for name in vars(holder)}
        if own.isdisjoint(hooks) and term.clip is None and not term.validates:
            close = "".join(suggest(name, hooks) for name in sorted(own) if not name.startswith("_"))
            part = name_part("term", name_if_custom(type(term)))
            warnings.warn(f"{part} overrides no hook of Term, so it changes nothing{close}", UserWarning, stacklevel=4)


def check_features(experiment: Experiment, module: nn.Module) -> None:
    """Raise ValueError if the method uses representations, and the model does not give them."""
    method = experiment.resolved_method
    if any(term.features for term in method.local) and not (hasattr(module, "features") and hasattr(module, "head")):
        raise ValueError(
            f"method '{method.name}' needs a model with `features` and `head`; '{experiment.model}' has none: "
            "give them to the model, or use another (resnet10, small_cnn)"
        )


def partition_clients(experiment: Experiment, domains: Domains) -> tuple[Client, ...]:
    """Partition the training data; return all clients, whether they train or not."""
    names = [d.name for d in domains.domains]
    sizes = {d.name: len(d.labels) for d in domains.domains}
    default_numbers = dict(zip(names, domains.clients_per_domain, strict=True))
    numbers = _fill_per_domain("clients_per_domain", experiment.clients_per_domain, default_numbers)
    defaults = dict(zip(names, domains.samples_per_client, strict=True))
    samples = {name: number or sizes[name] // numbers[name] for name, number in defaults.items()}
    samples |= _apply_fraction(experiment, domains)
    clients = partition_samples(
        sizes,
        numbers,
        _fill_per_domain("samples_per_client", experiment.samples_per_client, samples),
        experiment.get_seed("split"),
        {d.name: d.labels for d in domains.domains},
        experiment.skew,
        experiment.validation,
    )
    known = {client.id for client in clients} | set(names)
    for key in ("only", "without"):
        unknown = sorted(set(getattr(experiment, key)) - known)
        if unknown:
            words = unknown[0].split()
            close = suggest(unknown[0], sorted(known))
            if len(words) > 1 and known.issuperset(words):
                close = f" (did you mean {key}={','.join(words)}? Commas separate names)"
            raise ValueError(f"{key} names '{unknown[0]}'{close}; the domains are {names}")
    if experiment.evaluate == "unseen" and (len(experiment.without) != 1 or experiment.without[0] not in names):
        raise ValueError(
            f"evaluate = 'unseen' with without = {list(experiment.without)}: one run leaves out one domain, of {names}; "
            "`fedheal run`, `fedheal compare` and fedheal.compare(...) make one run for each domain if without is not set"
        )
    if not any(takes_part(experiment, client) for client in clients):
        given = {"only": list(experiment.only), "without": list(experiment.without)}
        fields = " and ".join(f"{key} = {names}" for key, names in given.items() if names)
        raise ValueError(f"{fields}: no client is left to train; name fewer in without, or others in only")
    return clients


def takes_part(experiment: Experiment, client: Client) -> bool:
    """Return whether a client trains, according to `only` and `without`."""
    names = {client.id, client.domain}
    return (not experiment.only or bool(names & set(experiment.only))) and not names & set(experiment.without)


def _split_examples(
    experiment: Experiment, domains: Domains, clients: tuple[Client, ...], device: torch.device
) -> tuple[dict[str, Split], dict[str, Split]]:
    """Return the examples that each client trains with, and those that it holds out, on the device."""
    train, validation, by_domain = dict[str, Split](), dict[str, Split](), dict[str, Split]()
    for client in clients:
        indices, domain, number = client.indices, domains[client.domain], client.held_out
        cut = len(indices) - number
        if experiment.validation and not 0 < number < len(indices):
            raise ValueError(
                f"validation = {experiment.validation}: of the {len(indices)} examples of client '{client.id}' this leaves "
                f"{number} to validate and {cut} to train with"
            )
        if takes_part(experiment, client):
            train[client.id] = by_domain[client.domain] = _move_split(domain.select(indices[:cut]), device)
        if experiment.validation:
            validation[client.id] = _move_split(domain.select(indices[cut:]), device)
    _check_image_sizes(experiment, by_domain, device)
    if experiment.pool:
        images = torch.cat([split.images for split in train.values()])
        labels = torch.cat([split.labels for split in train.values()])
        train = {"pooled": Split(images, labels)}
    return train, validation


def _halve_splits(experiment: Experiment, splits: Mapping[str, Split]) -> tuple[dict[str, Split], dict[str, Split]]:
    """Return the examples that set a method's weights, and others for the score.

    A sweep must not see the examples that set the weights.
    """
    halves: list[dict[str, Split]] = [{}, {}]
    for client, split in splits.items():
        if len(split) < 2:
            raise ValueError(
                f"validation = {experiment.validation} leaves client '{client}' one example, but method "
                f"'{experiment.resolved_method.name}' needs two: one sets its weights, another scores the model; use more"
            )
        middle = (len(split) + 1) // 2
        for half, part in zip(halves, (slice(middle), slice(middle, None)), strict=True):
            half[client] = Split(split.images[part], split.labels[part])
    return halves[0], halves[1]


def _move_split(split: Split, device: torch.device) -> Split:
    return Split(split.images.to(device), split.labels.to(device))


def _check_image_sizes(experiment: Experiment, by_domain: Mapping[str, Split], device: torch.device) -> None:
    """Raise ValueError if images have several sizes where only one is possible."""
    sizes = {domain: " x ".join(map(str, split.images.shape[2:])) for domain, split in by_domain.items()}
    if len(set(sizes.values())) <= 1:
        return
    listed = ", ".join(f"{domain} {size}" for domain, size in sizes.items())
    problem = f"the images of '{experiment.data}' are of several sizes ({listed})"
    if experiment.pool:
        raise ValueError(f"{problem} and cannot be pooled: bring them to one size")
    if device.type == "cuda" and experiment.engine != "serial":
        raise ValueError(f"{problem}, which only engine=serial supports: give that, or bring them to one size")


def _try_model(name: str, local: LocalTraining, domains: Domains) -> None:
    """Try the model on one image of each shape: evaluate it and, where clients train with that shape, train it."""
    features = any(term.features for term in local.terms)
    splits = [*local.examples.values(), *(domain.test for domain in reversed(domains.domains))]
    for shape, image in {split.images.shape[1:]: split.images[:1] for split in splits}.items():
        sample = normalise_images(image.to(local.device))
        check_evaluates(local.module, name, sample, local.classes)
        sizes = {client: len(split) for client, split in local.examples.items() if split.images.shape[1:] == shape}
        singles = [client for client, size in sizes.items() if find_smallest_batch_size(size, local.training) == 1]
        if sizes:
            single = singles[0] if singles else None
            check_trains(local.module, name, sample, local.classes, single, features, local.precision)


def _fill_per_domain(field: str, setting: Any, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return one number per domain: the setting, or the default where it says nothing."""
    if not isinstance(setting, dict):
        return {name: setting or number for name, number in defaults.items()}
    for name in setting:
        if name not in defaults:
            raise ValueError(f"{field} names '{name}'{suggest(name, list(defaults))}; the domains are {list(defaults)}")
    return {**defaults, **setting}


def _apply_fraction(experiment: Experiment, domains: Domains) -> dict[str, int]:
    """Return the samples per client where they are given as a fraction of the whole training set."""
    sizes = {d.name: d.nominal or len(d.labels) for d in domains.domains}
    parts = _fill_per_domain("fraction", experiment.fraction, dict.fromkeys(sizes))
    samples = {name: multiply_fraction(part, sizes[name]) for name, part in parts.items() if part is not None}
    for name, number in samples.items():
        if number < 1:
            available = f"the {sizes[name]:,} training examples of domain '{name}'"
            raise ValueError(f"fraction = {parts[name]} of {available} is less than one: use a larger fraction")
    return samples
