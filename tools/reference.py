"""Write docs/reference.md: every command, every field of an experiment and every parameter of a method.

The page comes from their declarations. Python names are documented by their docstrings (docs/api).

python tools/reference.py > docs/reference.md
"""

from __future__ import annotations

import typing
import warnings
from collections.abc import Iterator
from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

with warnings.catch_warnings():  # typer still imports names that click has deprecated
    warnings.simplefilter("ignore", DeprecationWarning)
    import typer

    from fedheal import cli

from fedheal import methods
from fedheal.core.parameter import Parameter, get_parameters
from fedheal.runs.schema import FREE
from fedheal.simulate.experiment import Experiment

FIELDS = {
    "name": "the run folder's name; made of method, data, seed and the fields that differ from the protocol if empty",
    "method": "a method's name, your own as `package.module:function`, or in Python a `Method`; its parameters may stand "
    "beside the fields",
    "data": "a data set's name (`fedheal data list`), your own as `package.module:function`, or in Python a `Domains` or a "
    "function that returns one",
    "model": "a model's name, one of a library as `timm:NAME` or `torchvision:NAME`, your own as `package.module:factory`, "
    "or in Python a module, whose values every run starts from, or a function `(num_classes[, input_shape])`",
    "width": "the model's width, where it has one; its own default if not given",
    "weights": "a safetensors file of the model's initial values; random ones if not given",
    "rounds": "communication rounds",
    "seed": "the number that all random choices follow from; each of the next three fields replaces it for some of them",
    "split_seed": "the seed, instead of `seed`, of the clients' examples: which ones each holds, trains with and holds out",
    "init_seed": "the seed, instead of `seed`, of the initial model",
    "batch_seed": "the seed, instead of `seed`, of the order of batches, augmentation, random layers, the cohorts and who "
    "drops out",
    "data_root": "the folder of the data, or an exported file; by default the one that `FEDHEAL_DATA` names",
    "allow_missing": "go on without the domains that are not on disk",
    "classes": "which classes count where domains have different ones: those of all, or of any",
    "image_size": "pixels a side; the data set's own if not given",
    "clients_per_domain": "how many clients each domain has, or one for each (`mnist=5,usps=2`, with commas or "
    "spaces); the protocol's by default",
    "samples_per_client": "training examples a client, or one number for each domain; the protocol's if not given",
    "fraction": "share of a domain's whole training set that each client holds, instead of a number",
    "dirichlet": "label skew within a domain: the smaller, the stronger; none if not given",
    "pathological": "label skew within a domain: each client holds this many classes; all if not given",
    "quantity": "skew of the sizes of a domain's clients: the smaller, the stronger; equal sizes if not given",
    "class_filling": "every client gets every class, as in the code released with the paper",
    "only": "domains or clients that train, no others, separated by commas (`mnist,usps`); all if empty",
    "without": "domains or clients that do not train, separated by commas; the model is still evaluated on their domains",
    "pool": "one machine that holds the data of all who train",
    "validation": "share of each client's training data that is held out for validation",
    "public": "the data set of the public images that `fccl` and `fcclplus` need; training images that no client holds if not "
    "given",
    "participation": "share of the clients that are asked each round",
    "dropout": "probability that a client which was asked does not reply",
    "epochs": "passes over its data that a client makes each round",
    "steps": "steps that a client takes each round, instead of epochs: give one of the two",
    "batch_size": "examples a step; the last, smaller batch of an epoch counts",
    "optimizer": "the clients' optimiser, started afresh each round; adam and adamw have b2 = 0.999 and eps = 1e-8 (Kingma and "
    "Ba 2015)",
    "lr": "the clients' learning rate; with a schedule, that of the first round after the warm-up",
    "lr_schedule": "how the clients' learning rate falls over the rounds (methods.md has the formulas)",
    "lr_decay": "the factor of each decay: 0.1 by default with step, 0.99 a round with exponential",
    "lr_decay_every": "rounds from one decay to the next, with step",
    "warmup_rounds": "rounds in which the learning rate rises in equal steps, before the schedule begins",
    "momentum": "the clients' momentum, b1 of adam and adamw; started afresh each round",
    "weight_decay": "the clients' weight decay: added to the gradient; with adamw it shrinks the weights (Loshchilov and "
    "Hutter 2019)",
    "augment": "what is done to training images",
    "server_optimizer": "how the global model follows the aggregated one (Reddi et al. 2021); a method's name may say it, as "
    "in `fedheal+fedadam`",
    "server_lr": "the server's learning rate; 1 is the aggregated model itself; 0.01 by default with adam, yogi and adagrad",
    "server_momentum": "the server's momentum, b1 of the others; 0.9 by default with adam and yogi (Reddi et al. 2021)",
    "server_beta2": "b2 of adam and yogi on the server (Reddi et al. 2021)",
    "server_eps": "what adam, yogi and adagrad on the server add to the root of v (Reddi et al. 2021)",
    "evaluate": "`unseen`: one run for each domain, which does not train and is tested on; `all`: one run, tested on all",
    "eval_every": "rounds from one evaluation to the next; the last round is always evaluated",
    "on_bad_update": "an error, or count the client as absent",
    "device": "`auto` (a GPU where there is one), `cpu`, `cuda`, `cuda:1`, ...",
    "precision": "arithmetic on a GPU; `auto` is tf32 there and fp32 elsewhere",
    "deterministic": "the same bits again on a GPU, at the cost of speed",
    "engine": "one client after another (`serial`), side by side (`lanes`), as one program (`cohort`), or on a "
    "cluster (`ray`); `auto` is `serial` on a CPU, `cohort` or `lanes` on a GPU",
    "ray_address": "the cluster of `engine=ray`: `auto` (by default), `local` or HOST:PORT",
    "lanes": "clients trained side by side on a GPU; as many as fill it if not given",
    "threads": "threads a process; a part of the experiment, since it changes sums",
    "workers": "processes that train clients; changes no result; with `engine=ray` by default 0, as many as there is room for",
    "save_seconds": "how often the state is saved; 0 is every round",
}
NAMES: dict[Any, str] = {str: "text", int: "whole number", float: "number", bool: "true or false"}


def make_page() -> str:
    """Return the page as Markdown."""
    head = [
        "# Reference",
        "",
        "Written by `tools/reference.py` from the code; a test fails if it is out of date.",
        "[Python API](api/index.md) has the names to import.",
    ]
    return "\n".join([*head, "", *_list_commands(), "", *_list_fields(), "", *_list_parameters(), ""])


def _list_commands() -> list[str]:
    lines = [
        "## Commands",
        "",
        "`fedheal COMMAND --help` explains each option.",
        "",
        "| command | what it does | options |",
        "|---|---|---|",
    ]
    for usage, command in _walk_commands(typer.main.get_command(cli.app), "fedheal"):
        options = (f"`{max(option.opts, key=len)}`" for option in command.params if option.param_type_name == "option")
        lines.append(f"| `{usage}` | {command.get_short_help_str(200).replace('<', '&lt;')} | {', '.join(options)} |")
    return lines


def _walk_commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield each command with its usage, such as `fedheal run [FILE.toml] [key=value ...]`."""
    if hasattr(command, "commands"):
        for key, inner in command.commands.items():
            yield from _walk_commands(inner, f"{name} {key}")
    else:
        pieces = command.collect_usage_pieces(command.make_context(name, [], resilient_parsing=True))
        yield " ".join([name, *(piece for piece in pieces if piece != "[OPTIONS]")]), command


def _list_fields() -> list[str]:
    lines = [
        "## Fields of an experiment",
        "",
        "For `fedheal run key=value`, a TOML file and `fedheal.Experiment(...)`. A data set's protocol may have other",
        "defaults (`fedheal data list`). A run's `experiment.toml` has all of them that are set. Those marked * may differ",
        "between a run and its resumption.",
        "",
        "| field | default | values | what it is |",
        "|---|---|---|---|",
    ]
    for name, field in Experiment.model_fields.items():
        mark = "*" if name in FREE else ""
        lines.append(
            f"| `{name}`{mark} | {_format_value(field.default)} | {_describe_values(field)} | {FIELDS[name]} |"
        )
    return lines


def _list_parameters() -> list[str]:
    lines = [
        "## Parameters of methods",
        "",
        "Also shown by `fedheal methods NAME`. MarsFL and RethinkFL are public code of the research group behind the FedHEAL",
        "paper, which itself does not give the parameters of the methods it compares with. [methods.md](methods.md) says more.",
        "Every number is at most 1e30, which float32 still holds.",
        "",
        "| part | parameter | default | values | what it is | source of the default |",
        "|---|---|---|---|---|---|",
    ]
    for part, constructor in methods.PARTS.items():
        for name, parameter in get_parameters(constructor).items():
            columns = (
                _format_value(parameter.default),
                _describe_allowed(parameter),
                parameter.description,
                parameter.source,
            )
            lines.append(f"| `{part}` | `{name}` | {' | '.join(columns)} |")
    return lines


def _format_value(value: Any) -> str:
    if value is None or value in ("", ()):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _describe_allowed(parameter: Parameter) -> str:
    """Return the values that a parameter may have, in the words of the fields' table."""
    if parameter.choices:
        return ", ".join(_format_value(choice) for choice in parameter.choices)
    words = NAMES[type(parameter.default)]
    for sign, limit in ((">=", parameter.ge), (">", parameter.gt), ("<=", parameter.le), ("<", parameter.lt)):
        words += "" if limit is None else f" {sign} {limit}"
    return words


def _describe_values(field: FieldInfo) -> str:
    """Return the values that a field may have, in words."""
    kind = field.annotation
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(kind))
    kinds = [arg for arg in typing.get_args(kind) or (kind,) if arg is not type(None) and arg is not Ellipsis]
    words = "list" if typing.get_origin(kind) is tuple else NAMES.get(kinds[0], "")
    for bound in field.metadata:
        for sign, limit in ((">=", Ge), (">", Gt), ("<=", Le), ("<", Lt)):
            if isinstance(bound, limit):
                value = getattr(bound, limit.__name__.lower())
                words += f" {sign} {'2^63' if value == 2**63 else value}"
    return words


if __name__ == "__main__":
    print(make_page(), end="")
