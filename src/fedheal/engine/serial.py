"""The serial engine: train one client after another, on any device.

A client starts from the global model with a fresh optimiser. It takes its epochs or steps over its own shuffled
examples (the last, smaller batch included), and returns what it changed. Terms are called before training, at each step
and at the end.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedheal.core.deprecated_paths import warn_of_renames
from fedheal.core.layout import Layout, Packed, as_real
from fedheal.core.rng import derive, generator
from fedheal.core.updates import Metric, Reply
from fedheal.data.augment import Choices, apply_choices, draw_choices, normalise_images
from fedheal.data.domains import Split
from fedheal.engine.local_optimizer import LeanSGD, build_optimizer, compute_lr
from fedheal.engine.precision import autocast
from fedheal.local.fedprox import FedProx
from fedheal.local.term import Arrays, Batch, Context, NotCapturableError, Term, effective_step

__getattr__ = warn_of_renames(__name__, {"Bench": "LocalTraining", "seeded": "use_seed"})

GENERATORS = threading.RLock()  # held while torch's global generators are seeded: all threads have the same ones
Shared = tuple[Arrays, ...]  # the shared values of each term

EVALUATE_BATCH = 512
EVALUATE_PIXELS = 1 << 22  # in a batch on a GPU, which smaller ones leave idle
JOINED_BYTES = 1 << 30  # of images on a GPU, up to which splits are evaluated as one
CACHED_PIXELS = 1 << 16  # in a batch on a CPU, so that the network's activations stay in the caches


@dataclass(frozen=True)
class Training:
    """How a client trains."""

    lr: float
    batch_size: int
    epochs: int = 1  # how often a client goes over its data in a round
    steps: int | None = None  # how many it takes instead
    momentum: float = 0.9
    weight_decay: float = 1e-5
    augment: str = "none"  # or `flip`, `crop`, `crop-flip`
    optimizer: str = "sgd"  # or `adam`, `adamw`
    lr_schedule: str = "constant"  # or `cosine`, `step`, `exponential`, over the rounds; see `compute_lr`
    lr_decay: float | None = None
    lr_decay_every: int | None = None
    warmup_rounds: int = 0

    def resolve_lr(self, number: int, rounds: int) -> "Training":
        """Return the training of a round, with its learning rate and no schedule."""
        if self.lr_schedule == "constant" and not self.warmup_rounds:
            return self
        settings = (self.lr_schedule, self.lr_decay, self.lr_decay_every, self.warmup_rounds)
        lr = compute_lr(self.lr, number, rounds, *settings)
        return replace(self, lr=lr, lr_schedule="constant", warmup_rounds=0)


@dataclass(frozen=True)
class LocalTraining:
    """What an engine needs to train the clients."""

    module: nn.Module  # the module to train in
    layout: Layout
    training: Training
    seed: int  # of batches, random layers, augmentation and cohorts
    device: torch.device  # of the module and the examples
    examples: dict[str, Split]  # each client's training examples
    classes: int = 0  # how many there are
    rounds: int = 1  # how many the run has
    terms: tuple[Term, ...] = ()
    received_loss: bool = False  # whether clients report the loss of the model that they receive
    validation: dict[str, Split] = field(default_factory=dict)  # each client's held-out examples
    precision: str = "fp32"  # of the arithmetic, see `engine.precision`
    public: Tensor | None = None  # public images without labels, uint8 `[N, 3, H, W]`, the same for every client

    def load_model(self, model: Packed, training: bool) -> nn.Module:
        """Load a model into the module and return it, in training or in evaluation mode."""
        self.layout.load_into(self.module, model)
        return set_mode(self.module, training)


def set_mode(module: nn.Module, training: bool) -> nn.Module:
    """Return the module in training or in evaluation mode, as `module.train(training)` does; most often it is already."""
    return module.train(training) if any(part.training is not training for part in module.modules()) else module


@dataclass(frozen=True)
class Task:
    """One client's round; `slots` hold what each term kept with the client."""

    client: str
    round: int
    slots: tuple[Arrays, ...] = ()


@dataclass(frozen=True)
class ClientResult:
    """The result of a task: the reply, the client's new slots, and each term's message to the server."""

    reply: Reply
    slots: tuple[Arrays, ...] = ()
    messages: tuple[Arrays, ...] = ()


class SerialEngine:
    """An engine that trains a client when its result is asked for."""

    def __init__(self, local_training: LocalTraining) -> None:
        self.local_training = local_training

    def train(self, model: Packed, shared: Shared, tasks: Sequence[Task]) -> Iterator[ClientResult]:
        """Train the clients one after another and yield their results."""
        for task in tasks:
            yield train_client(self.local_training, model, shared, task)


def train_client(local_training: LocalTraining, model: Packed, shared: Shared, task: Task) -> ClientResult:
    """Train a client for a round, starting from the global `model`."""
    training = local_training.training.resolve_lr(task.round, local_training.rounds)
    local_training = replace(local_training, training=training)

    def fit(start: Packed, strength: float) -> Packed:
        retraining, contexts = proximal_retraining(local_training, model, task, strength, start)
        return _fit(retraining, start, task, "personal", contexts)[0]

    contexts = make_contexts(local_training, model, shared, task, fit)
    metrics: dict[str, Metric] = {}
    if local_training.received_loss:
        metrics["loss"], _ = evaluate_split(local_training, model, local_training.examples[task.client])
    start = prepare_start(local_training, contexts, model)
    local, loss = _fit(local_training, start, task, "batches", contexts)
    return finish_client(local_training, model, task, contexts, local, metrics | {"train_loss": float(loss)})


def prepare_start(local_training: LocalTraining, contexts: Sequence[Context], start: Packed) -> Packed:
    """Call the terms' `prepare` and return the model that the client starts from."""
    for term, ctx in zip(local_training.terms, contexts, strict=True):
        start = term.prepare(ctx, start)
    return start


def finish_client(
    local_training: LocalTraining,
    model: Packed,
    task: Task,
    contexts: Sequence[Context],
    local: Packed,
    metrics: dict[str, Metric],
    out: Tensor | None = None,
    is_update_known: bool = False,
) -> ClientResult:
    """Call the terms' last hooks and return the result of training that ended at `local`.

    `out` receives the update, unless it has that of `local` already (`is_update_known`).
    """
    training, examples = local_training.training, len(local_training.examples[task.client])
    sent, finished = local, []
    for term, ctx in zip(local_training.terms, contexts, strict=True):
        sent = term.upload(ctx, sent)
        metrics |= term.metrics(ctx, local)
        finished.append(term.finish(ctx, local))
    steps = count_steps(examples, training)
    # How far Adam's steps go does not follow from its learning rate.
    is_sgd = training.optimizer == "sgd"
    reach = {"reach": effective_step(training.lr, training.momentum, steps)} if is_sgd else {}
    reply = Reply(
        client=task.client,
        delta=out if out is not None and is_update_known else torch.sub(sent.params, model.params, out=out),
        num_examples=examples,
        buffers=sent.buffers if len(sent.buffers) else None,
        counters=sent.counters if len(sent.counters) else None,
        metrics=metrics | {"steps": float(steps), "lr": training.lr, **reach},
    )
    return ClientResult(reply, tuple(slot for slot, _ in finished), tuple(message for _, message in finished))


def make_contexts(
    local_training: LocalTraining,
    model: Packed,
    shared: Shared,
    task: Task,
    fit: Callable[[Packed, float], Packed],
    nets: dict[str, nn.Module] | None = None,
) -> list[Context]:
    """Return each term's context for a client's round."""
    training, examples = local_training.training, local_training.examples[task.client]
    return [
        Context(
            client=task.client,
            round=task.round,
            rounds=local_training.rounds,
            lr=training.lr,
            momentum=training.momentum,
            steps=count_steps(len(examples), training),
            classes=local_training.classes,
            module=local_training.module,
            layout=local_training.layout,
            received=model,
            slot=slot,
            shared=values,
            fit=fit,
            gradient=lambda at: _compute_gradient(local_training, at, task),
            evaluate=lambda at: evaluate_split(local_training, at, examples),
            validate=lambda at: evaluate_split(local_training, at, local_training.validation[task.client]),
            nets={} if nets is None else nets,
            public_batches=lambda size: make_public_batches(local_training.public, size),
        )
        for slot, values in zip(task.slots, shared, strict=True)
    ]


def proximal_retraining(
    local_training: LocalTraining, model: Packed, task: Task, strength: float, start: Packed
) -> tuple[LocalTraining, Sequence[Context]]:
    """Return the local training and the contexts of a client's second training, kept near the received model by FedProx."""

    def refuse(start: Packed, strength: float) -> Packed:
        raise RuntimeError("a client's second training cannot start a third one")

    retraining = replace(local_training, terms=(FedProx(strength),))
    contexts = make_contexts(retraining, model, ({},), replace(task, slots=({},)), refuse)
    prepare_start(retraining, contexts, start)
    return retraining, contexts


def _fit(
    local_training: LocalTraining, start: Packed, task: Task, purpose: str, contexts: Sequence[Context]
) -> tuple[Packed, Tensor]:
    """Train from `start` with all terms; return the local model and its mean cross-entropy."""
    module, training = set_mode(local_training.module, training=True), local_training.training
    bound = local_training.layout.bind(module)
    bound.load(start)
    optimiser = build_optimizer(
        training.optimizer,
        module.parameters(),
        training.lr,
        training.momentum,
        training.weight_decay,
        fused=local_training.device.type == "cuda",
    )
    total, steps = torch.zeros((), dtype=torch.float64, device=local_training.device), 0
    rng = generator(local_training.seed, purpose, task.round, task.client)
    with use_seed(derive_layer_seed(local_training, purpose, task), local_training.device):
        for x, y, last in make_batches(local_training.examples[task.client], training, rng):
            total += train_step(local_training, optimiser, contexts, x, y, last)
            steps += 1
    optimiser.zero_grad(set_to_none=True)
    return bound.pack(), total / max(steps, 1)


def make_optimiser(local_training: LocalTraining) -> torch.optim.SGD:
    """Return a fresh SGD optimiser of the module's parameters, for steps that are captured once.

    Raises:
        NotCapturableError: The training has another optimiser, or a learning rate that changes from round to round.
    """
    training = local_training.training
    if training.optimizer != "sgd":
        raise NotCapturableError(f"captured steps are those of SGD, not of optimizer = '{training.optimizer}'")
    if training.lr_schedule != "constant" or training.warmup_rounds:
        raise NotCapturableError("captured steps have one learning rate, which lr_schedule or warmup_rounds changes")
    return torch.optim.SGD(
        local_training.module.parameters(),
        lr=training.lr,
        momentum=training.momentum,
        weight_decay=training.weight_decay,
        fused=local_training.device.type == "cuda",
    )


def derive_layer_seed(local_training: LocalTraining, purpose: str, task: Task) -> int:
    """Return the seed of dropout and other random layers."""
    return derive(local_training.seed, f"{purpose} layers", task.round, task.client)


def train_step(
    local_training: LocalTraining,
    optimiser: torch.optim.Optimizer | LeanSGD,
    contexts: Sequence[Context],
    x: Tensor,
    y: Tensor,
    last: bool,
) -> Tensor:
    """Take one step on one batch and return the batch's cross-entropy."""
    module, terms = local_training.module, local_training.terms
    optimiser.zero_grad(set_to_none=True)
    features: Tensor | None = None
    with autocast(local_training.precision, local_training.device):
        if any(term.features for term in terms):
            features = module.features(x)  # type: ignore[operator]
            logits = module.head(features)  # type: ignore[operator]
            features = features.to(x.dtype)
        else:
            logits = module(x)
        logits = logits.to(x.dtype)
        ce = loss = functional.cross_entropy(logits, y)
        batch = Batch(x=x, y=y, logits=logits, ce=ce, features=features, last_epoch=last)
        for term, ctx in zip(terms, contexts, strict=True):
            term_loss = term.loss(batch, ctx)
            loss = loss if term_loss is None else loss + term_loss
    torch.autograd.backward(loss)
    for term, ctx in zip(terms, contexts, strict=True):
        term.grad(ctx)
    for clip in [term.clip for term in terms if term.clip]:
        nn.utils.clip_grad_norm_(module.parameters(), clip)
    optimiser.step()
    return ce.detach()


def count_steps(examples: int, training: Training) -> int:
    """Return how many steps a client with so many examples takes in a round."""
    return training.epochs * -(-examples // training.batch_size) if training.steps is None else training.steps


def list_batch_sizes(examples: int, training: Training) -> list[tuple[int, bool]]:
    """Return the size of each batch of a client's round, and whether it belongs to the last epoch.

    >>> list_batch_sizes(3, Training(lr=0.1, batch_size=2, epochs=2))
    [(2, False), (1, False), (2, True), (1, True)]
    """
    per_epoch, steps = -(-examples // training.batch_size), count_steps(examples, training)
    sizes = [min(training.batch_size, examples - i * training.batch_size) for i in range(per_epoch)]
    last_epoch = (steps - 1) // per_epoch * per_epoch
    return [(sizes[t % per_epoch], t >= last_epoch) for t in range(steps)]


def find_smallest_batch_size(examples: int, training: Training) -> int:
    """Return the size of a client's smallest batch in a round: the rest of an epoch, if the steps reach it."""
    full_batches, rest = divmod(examples, training.batch_size)
    return rest if rest and count_steps(examples, training) > full_batches else training.batch_size


def make_batches(examples: Split, training: Training, rng: torch.Generator) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Yield the batches of a client's round: images, labels, and whether it is the last epoch."""
    for order, choices, last in plan_batches(len(examples), training, rng):
        index = order.to(examples.labels.device)
        selected = examples.images.index_select(0, index)  # copies whole images, where `images[index]` copies bytes
        images = apply_choices(selected, choices).contiguous(memory_format=torch.channels_last)
        yield normalise_images(images), examples.labels[index], last


def make_public_batches(images: Tensor | None, size: int) -> Iterator[Tensor]:
    """Yield public images in their order, in batches of at most `size` that differ by one image at most."""
    if images is not None:
        for batch in torch.tensor_split(images, -(-len(images) // size)):
            yield normalise_images(batch.contiguous(memory_format=torch.channels_last))


def plan_batches(examples: int, training: Training, rng: torch.Generator) -> Iterator[tuple[Tensor, Choices, bool]]:
    """Yield the examples of each batch, shuffled in each epoch, how they are augmented, and whether it is the last epoch."""
    per_epoch = -(-examples // training.batch_size)
    steps_left = count_steps(examples, training)
    while steps_left > 0:
        order = torch.randperm(examples, generator=rng)
        for selected in torch.split(order, training.batch_size)[:steps_left]:
            yield selected, draw_choices(len(selected), training.augment, rng), steps_left <= per_epoch
        steps_left -= per_epoch


@torch.no_grad()
def evaluate_split(local_training: LocalTraining, model: Packed, split: Split) -> tuple[float, float]:
    """Return a model's mean cross-entropy and accuracy (0 to 1) on some examples, which are not augmented."""
    module = local_training.load_model(model, training=False)
    loss, correct = 0.0, 0
    for images, labels in eval_batches(split):
        with autocast(local_training.precision, local_training.device):
            logits = module(normalise_images(images)).to(torch.float32)
        loss += float(functional.cross_entropy(logits, labels, reduction="sum"))
        correct += int((logits.argmax(dim=1) == labels).sum())
    return loss / len(split), correct / len(split)


def _compute_gradient(local_training: LocalTraining, model: Packed, task: Task) -> Tensor:
    """Return the gradient of the mean loss over a client's data at `model`, as a flat vector."""
    module, examples = local_training.load_model(model, training=True), local_training.examples[task.client]
    module.zero_grad(set_to_none=True)
    with use_seed(derive_layer_seed(local_training, "gradient", task), local_training.device):
        for images, labels in gradient_batches(examples):
            with autocast(local_training.precision, local_training.device):
                loss = functional.cross_entropy(module(normalise_images(images)), labels, reduction="sum")
            torch.autograd.backward(loss / len(examples))
    named = dict(module.named_parameters(remove_duplicate=False))
    tensors = [named[name] for name, _ in local_training.layout.sizes().tensors]
    gradients = [as_real(torch.zeros_like(t) if t.grad is None else t.grad) for t in tensors]
    module.zero_grad(set_to_none=True)
    return torch.cat([gradient.reshape(-1) for gradient in gradients]).detach()


def gradient_batches(split: Split) -> Iterator[tuple[Tensor, Tensor]]:
    """Return a split in batches of one size on every device: batch normalisation makes the gradient depend on it."""
    height, width = split.images.shape[-2:]
    return _cut(split, max(16, min(EVALUATE_BATCH, EVALUATE_PIXELS // (height * width))))


def eval_batches(split: Split, cached: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
    """Return a split in batches; `cached`: that fit into a CPU's caches, where the batch size does not change the outcome."""
    return _cut(split, choose_eval_batch_size(split, cached))


def choose_eval_batch_size(split: Split, cached: bool = False) -> int:
    """Return the size of the batches in which a split is evaluated."""
    height, width = split.images.shape[-2:]
    if split.images.device.type == "cuda":
        return max(16, min(1 << 12, EVALUATE_PIXELS // (height * width)))
    return max(4, min(EVALUATE_BATCH, CACHED_PIXELS // (height * width))) if cached else EVALUATE_BATCH


def _cut(split: Split, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(torch.split(split.images, size), torch.split(split.labels, size), strict=True)


@torch.no_grad()
def find_correct(module: nn.Module, split: Split, precision: str = "fp32") -> Tensor:
    """Return for every example of a split whether the module classifies it correctly, `[N]` booleans on its device."""
    set_mode(module, training=False)
    correct = []
    for images, labels in eval_batches(split, cached=True):
        with autocast(precision, images.device):
            correct.append(module(normalise_images(images)).argmax(dim=1) == labels)
    return torch.cat(correct)


def find_correct_in_turn(local_training: LocalTraining, pairs: Sequence[tuple[Packed, Split]]) -> list[Tensor]:
    """Return, for each pair of a model and a split, which examples the model classifies correctly."""
    correct: list[Tensor] = []
    for _, group in groupby(pairs, key=lambda pair: id(pair[0])):
        models, splits = zip(*group, strict=True)
        module = local_training.load_model(models[0], training=False)
        joined = join_on_gpu(splits)
        if joined is None:
            correct += [find_correct(module, split, local_training.precision) for split in splits]
        else:
            hits = find_correct(module, joined, local_training.precision)
            correct += torch.split(hits, [len(split) for split in splits])
    return correct


def join_on_gpu(splits: Sequence[Split]) -> Split | None:
    """Return small splits on a GPU as one: it would spend most of the time on launches for many small batches."""
    images = [split.images for split in splits]
    is_small = images[0].is_cuda and sum(part.nbytes for part in images) <= JOINED_BYTES
    if not is_small or len({part.shape[1:] for part in images}) > 1:
        return None
    return Split(torch.cat(images), torch.cat([split.labels for split in splits]))


@contextmanager
def use_seed(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's global generators for the context and restore them afterwards. Other threads wait."""
    with GENERATORS, torch.random.fork_rng([device] if device.type == "cuda" else []):
        if torch.cuda.is_available() or device.type != "cpu":
            torch.manual_seed(seed)
        else:  # the same numbers; `torch.manual_seed` formats a stack trace for a GPU that may come later
            torch.default_generator.manual_seed(seed)
        yield
