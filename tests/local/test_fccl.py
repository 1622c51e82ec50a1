"""FCCL and FCCL+ by hand, against the published formulas written in numpy, and in rounds on tiny data."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedheal
from fedheal.core.layout import Layout, Packed
from fedheal.engine import serial
from fedheal.local.cross_correlation import correlate_logits, use_batch_statistics
from fedheal.local.fccl import FCCL, distil
from fedheal.local.fcclplus import FCCLPlus, compare_similarity, distil_non_targets
from fedheal.local.term import Batch, Context
from fedheal.simulate.round import initial_state
from local.quadratic import absorb_updates, make_packed, make_term_context, vector
from local.rounds import make_federation, run_rounds
from tiny_data import quick
from tiny_runs import is_same

TERMS = [FCCL(public_images=8, public_batch=4), FCCLPlus(public_images=8, public_batch=4)]


# The losses by hand


def test_the_correlation_loss_by_hand() -> None:
    """Columns (1, 0, -1) and (1, -2, 1) have deviations 1 and sqrt(3), and are orthogonal. With themselves C = diag(2/3, 2/3):
    twice (1/3)^2 and, weighted by 0.5, twice (0 + 1)^2.
    """
    x = torch.tensor([[1.0, 1.0], [0.0, -2.0], [-1.0, 1.0]])
    assert correlate_logits(x, x, 0.5).item() == pytest.approx(2 / 9 + 0.5 * 2)
    # Swapped columns have C = 0 on the diagonal and 2/3 beside it.
    assert correlate_logits(x, x.flip(1), 0.5).item() == pytest.approx(2 * 1 + 0.5 * 2 * (5 / 3) ** 2)


def test_correlation_ignores_shift_and_scale() -> None:
    x, y = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(correlate_logits(x, y, 0.1), correlate_logits(3 * x + 5, 0.5 * y - 1, 0.1))


def test_a_class_with_constant_logits_has_a_finite_loss_and_gradient() -> None:
    x = torch.tensor([[1.0, 2.0], [1.0, 3.0], [1.0, 5.0]], requires_grad=True)
    loss = correlate_logits(x, x.detach(), 1.0)
    assert torch.autograd.grad(loss, x)[0].isfinite().all()
    assert loss.item() == pytest.approx(1 + (2 / 3 - 1) ** 2 + 2)  # its correlations are 0


def test_distillation_by_hand() -> None:
    """The teacher says 3/4 and 1/4, the student 1/2 and 1/2: 3/4 log(3/2) + 1/4 log(1/2) = 0.130812."""
    teacher, student = torch.tensor([[math.log(3.0), 0.0]]), torch.zeros(1, 2)
    assert distil(student, teacher).item() == pytest.approx(0.130812, rel=1e-5)
    assert distil(teacher, teacher).item() == 0


def test_non_target_distillation_by_hand() -> None:
    """Teacher (1/2, 1/4, 1/4), student (1/3, 1/3, 1/3), label 0: twice 1/4 log(3/4) = -0.143841. At temperature 2 with logits
    twice as large, four times as much.
    """
    teacher, student, y = torch.tensor([[math.log(2.0), 0.0, 0.0]]), torch.zeros(1, 3), torch.tensor([0])
    assert distil_non_targets(student, teacher, y, 1.0).item() == pytest.approx(-0.143841, rel=1e-5)
    assert distil_non_targets(student, 2 * teacher, y, 2.0).item() == pytest.approx(-4 * 0.143841, rel=1e-5)


def test_instance_similarity_by_hand() -> None:
    """Own cosines to the two others are equal in each row, (1/2, 1/2); the target's first row says 3/4 and 1/4, the others the
    same as the own: 0.130812 / 3. The diagonal does not count.
    """
    own, target = torch.eye(3), 7 * torch.eye(3)
    target[0, 1] = 0.5 * math.log(3.0)
    assert compare_similarity(own, target, 0.5).item() == pytest.approx(0.130812 / 3, rel=1e-5)


# The published formulas in numpy, entry by entry


def standardise(x: np.ndarray) -> np.ndarray:
    return (x - x.mean(axis=0)) / x.std(axis=0, ddof=1)


def softmax(x: np.ndarray) -> np.ndarray:
    return np.exp(x) / np.exp(x).sum()


def compute_correlation(z: np.ndarray, mean: np.ndarray, weight: float) -> float:
    a, b, classes = standardise(z), standardise(mean), z.shape[1]
    c = [[sum(a[n, i] * b[n, j] for n in range(len(a))) / len(a) for j in range(classes)] for i in range(classes)]
    same = sum((c[i][i] - 1) ** 2 for i in range(classes))
    return same + weight * sum((c[i][j] + 1) ** 2 for i in range(classes) for j in range(classes) if i != j)


def compute_similarity(features: list[np.ndarray], own: int, temperature: float) -> float:
    """Return the KL divergence of client `own` from the softmax of the mean cosines, without an image's cosine to itself."""
    unit = [f / np.linalg.norm(f, axis=1, keepdims=True) for f in features]
    total, images = 0.0, len(unit[0])
    for n in range(images):
        rows = [np.delete(u @ u[n], n) / temperature for u in unit]
        t, s = softmax(np.mean(rows, axis=0)), softmax(rows[own])
        total += float(np.sum(t * np.log(t / s)))
    return total / images


def compute_non_target(z: np.ndarray, teacher: np.ndarray, y: np.ndarray, temperature: float) -> float:
    total = 0.0
    for student_row, teacher_row, label in zip(z / temperature, teacher / temperature, y, strict=True):
        s, t = np.delete(softmax(student_row), label), np.delete(softmax(teacher_row), label)
        total += float(np.sum(t * np.log(t / s)))
    return temperature**2 * total / len(z)


def test_the_losses_are_those_of_the_published_formulas() -> None:
    rng = np.random.default_rng(5)
    logits, features = rng.normal(size=(3, 16, 10)), [rng.normal(size=(16, 7)) for _ in range(3)]
    y = rng.integers(0, 10, 16)
    z, mean = torch.from_numpy(logits[0]), torch.from_numpy(logits.mean(axis=0))
    expected = compute_correlation(logits[0], logits.mean(axis=0), 0.0051)
    assert correlate_logits(z, mean, 0.0051).item() == pytest.approx(expected, rel=1e-12)
    units = [torch.nn.functional.normalize(torch.from_numpy(f), dim=1) for f in features]
    cosines = torch.stack([unit @ unit.T for unit in units])
    expected = compute_similarity(features, 0, 0.02)
    assert compare_similarity(cosines[0], cosines.mean(dim=0), 0.02).item() == pytest.approx(expected, rel=1e-10)
    expected = compute_non_target(logits[0], logits[1], y, 3.0)
    got = distil_non_targets(z, torch.from_numpy(logits[1]), torch.from_numpy(y), 3.0)
    assert got.item() == pytest.approx(expected, rel=1e-12)


# The exchange


class IdentityFeatures(nn.Module):
    """Features are the inputs; logits are the features times a matrix."""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.head = nn.Linear(size, size)
        nn.init.eye_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def features(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x)
        return logits


IMAGES = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))


def make_context(term: FCCL | FCCLPlus, images: Tensor | None = IMAGES, **keys: Any) -> Context:
    module = IdentityFeatures()

    def make_public_batches(size: int) -> tuple[Tensor, ...]:
        return () if images is None else torch.tensor_split(images, -(-len(images) // size))

    received = Layout.of(module).pack(module.state_dict())
    return make_term_context(term, received, module=module, classes=3, public_batches=make_public_batches, **keys)


@pytest.mark.parametrize("term", TERMS, ids=["fccl", "fcclplus"])
def test_a_client_sends_its_outputs_and_the_server_averages_them(term: FCCL | FCCLPlus) -> None:
    """The logits of the identity are the images; those of twice the identity twice as large."""
    ctx = make_context(term, fit=lambda start, strength: start)
    term.prepare(ctx, ctx.received)
    doubled = Packed(2 * ctx.received.params, ctx.received.buffers, ctx.received.counters)
    messages = [term.finish(ctx, model)[1] for model in (ctx.received, doubled)]
    torch.testing.assert_close(messages[0]["logits"], IMAGES)
    locals_ = {"a": vector(0.0), "b": vector(0.0)}
    _, shared = absorb_updates(term, make_packed(0.0), locals_, messages, {}, weights=[0.25, 0.75])
    torch.testing.assert_close(shared["logits"], 1.5 * IMAGES)
    if isinstance(term, FCCLPlus):  # cosines within each half of the images; they do not depend on the head
        cosines = nn.functional.cosine_similarity(IMAGES[4:, None], IMAGES[None, 4:], dim=2)
        torch.testing.assert_close(shared["similarity"][4:], cosines)
    by_weight = type(term)(public_images=8, public_batch=4, public_weights="p")
    _, shared = absorb_updates(by_weight, make_packed(0.0), locals_, messages, {}, weights=[0.25, 0.75])
    torch.testing.assert_close(shared["logits"], 1.75 * IMAGES)
    assert absorb_updates(term, make_packed(0.0), {"a": vector(0.0)}, [], shared, weights=[1.0])[1] is shared


@pytest.mark.parametrize("term", TERMS, ids=["fccl", "fcclplus"])
def test_public_steps_lower_the_loss_and_leave_the_received_model(term: FCCL | FCCLPlus) -> None:
    target = IMAGES @ torch.randn(3, 3, generator=torch.Generator().manual_seed(2))
    cosines = nn.functional.cosine_similarity(IMAGES[:, None], IMAGES[None], dim=2)
    shared = {"logits": target, "similarity": torch.cat([cosines[:4, :4], cosines[4:, 4:]])}
    ctx = make_context(term, shared=shared, fit=lambda start, strength: start)
    before = ctx.received.params.clone()
    start = term.prepare(ctx, ctx.received)
    assert torch.equal(ctx.received.params, before)
    assert 0 < float((start.params - before).norm()) <= 2 * 0.01 + 1e-6  # two batches, gradients of norm 1 at most
    losses = [
        sum(float(correlate_logits(x @ w.T, t, 0.0051)) for x, t in zip(IMAGES.split(4), target.split(4), strict=True))
        for w in (before[:9].view(3, 3), start.params[:9].view(3, 3))
    ]
    assert losses[1] < losses[0]


@pytest.mark.parametrize(
    ("term", "message", "problem"),
    [
        (TERMS[0], {"logits": torch.zeros(8)}, "float32 of shape"),
        (TERMS[0], {"logits": torch.zeros(9, 3)}, "2 to 8 images"),
        (TERMS[0], {"logits": torch.zeros(8, 3, dtype=torch.float64)}, "float32 of shape"),
        (TERMS[0], {"logits": torch.zeros(8, 4)}, "4 classes, but the model's head has 3"),
        (TERMS[1], {"logits": torch.zeros(8, 3), "similarity": torch.zeros(8, 5)}, "similarity must have the shape"),
    ],
)
def test_a_message_that_cannot_be_outputs_is_rejected(term: Any, message: dict[str, Tensor], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        term.check_message(message, {}, Layout.of(IdentityFeatures()))


def test_clients_need_public_images_and_the_same_number_of_them() -> None:
    term = FCCL(intra=0.0)
    with pytest.raises(ValueError, match="FCCL needs public images"):
        term.finish(make_context(term, images=None), make_context(term).received)
    ctx = make_context(term, shared={"logits": torch.zeros(5, 3)})
    with pytest.raises(ValueError, match="of 5 public images, but client 'a' has 8"):
        term.prepare(ctx, ctx.received)


def test_only_batch_normalisation_trains_on_public_images() -> None:
    module = use_batch_statistics(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5)).train())
    assert [layer.training for layer in module] == [False, True, False]


# Local training


def test_the_local_loss_distils_the_received_and_the_own_model() -> None:
    """The own model comes from `fit`, five times, and is kept; a later round uses it and trains none."""
    fitted = []

    def fit(start: Packed, strength: float) -> Packed:
        fitted.append(strength)
        return Packed(start.params + 1, start.buffers, start.counters)

    term = FCCL(inter=2.0, intra=3.0, public_lr=0.0)
    ctx = make_context(term, fit=fit)
    assert term.prepare(ctx, ctx.received) is ctx.received
    own = ctx.received.params + 5
    x, y, logits = IMAGES[:4], torch.zeros(4, dtype=torch.int64), torch.ones(4, 3).cumsum(dim=1)
    loss = term.loss(Batch(x, y, logits, torch.tensor(0.0)), ctx)
    expected = 2 * distil(logits, x) + 3 * distil(logits, x @ own[:9].view(3, 3).T + 5)
    torch.testing.assert_close(loss, expected)
    slot, message = term.finish(ctx, ctx.received)
    assert fitted == [0.0] * 5
    assert torch.equal(slot["params"], own)
    assert message == {}
    later = make_context(term, fit=fit, slot=slot)
    term.prepare(later, later.received)
    torch.testing.assert_close(term.loss(Batch(x, y, logits, torch.tensor(0.0)), later), expected)
    assert len(fitted) == 5
    assert term.finish(later, later.received)[0] is slot


@pytest.mark.parametrize("name", ["fccl:public_lr=0,inter=0,intra=0", "fcclplus:public_lr=0,inter=0"])
def test_without_its_weights_it_is_fedavg_bit_for_bit(name: str) -> None:
    keys = {"model": "tiny_data:feature_model", "participation": 0.6}
    first, second = (run_rounds(make_federation(method=method, **keys), 3) for method in (name, "fedavg"))
    assert is_same(first.model, second.model)
    assert first.received == second.received
    assert not is_same(run_rounds(make_federation(method=name.split(":")[0], **keys), 2).model, second.model)


def test_the_public_images_alone_change_the_second_round_and_not_the_first() -> None:
    keys = {"model": "tiny_data:feature_model"}
    for rounds, same in ((1, True), (2, False)):
        method = "fccl:inter=0,intra=0"
        first, second = (run_rounds(make_federation(method=name, **keys), rounds) for name in (method, "fedavg"))
        assert is_same(first.model, second.model) == same


def test_the_own_model_has_seen_no_other_clients_data() -> None:
    """It is the received model, trained as FedAvg would: with one such training, the first round's local model."""
    fed, plain = (make_federation(method=m, model="tiny_data:feature_model") for m in ("fccl:pretrain=1", "fedavg"))
    task = serial.Task("plain-0", 1, ({},))
    state = initial_state(fed)
    result = serial.train_client(fed.local_training, state.model, ({},), task)
    assert set(result.slots[0]) == {"params", "buffers"}
    alone = serial.train_client(plain.local_training, state.model, (), serial.Task("plain-0", 1, ()))
    own = result.slots[0]["params"] - state.model.params
    assert float(nn.functional.cosine_similarity(own, alone.reply.delta, dim=0)) > 0.5  # another order of batches


@pytest.mark.soak
@pytest.mark.parametrize("method", ["fccl", "fcclplus+fedheal"])
def test_two_workers_give_the_bits_of_one(method: str) -> None:
    runs = [
        fedheal.run(quick(method=method, model="tiny_data:feature_model", workers=workers), progress=False)
        for workers in (1, 2)
    ]
    first, second = (run.model.state_dict() for run in runs)
    assert all(torch.equal(first[name], second[name]) for name in first)
