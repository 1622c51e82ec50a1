"""The same on a GPU: skipped where there is none."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedheal
from fedheal import Layout, Updates, aggregate, methods
from needs import needs
from tiny_data import quick

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _gpu():
    needs("gpu")


SETTINGS = [{}, {"variant": "released"}, {"fael": "exact"}, {"fael": False}]
SETTINGS += [{"soft": True}, {"soft": True, "forget": 0.1, "variant": "released"}, {"forget": 0.1, "per_domain": True}]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_aggregation_gives_the_same_model_and_stays_on_the_device(settings, dtype):
    finals = []
    for device in ("cpu", "cuda"):
        heal = aggregate.fedheal(kernel="reference", **settings)
        model, state = torch.zeros(3000, dtype=torch.float64, device=device), heal.init(Layout.flat(3000))
        rng = np.random.default_rng(0)
        for t in range(6):
            here = [str(m) for m in range(5) if (m + t) % 4]
            deltas = torch.from_numpy(rng.normal(size=(len(here), 3000))).to(device, dtype)
            sent = Updates(here, deltas, [10] * len(here), domains=["ab"[int(m) % 2] for m in here])
            out = heal.apply(model, sent, state, donate=bool(t % 2))
            model, state = out.model, out.state
        assert model.device.type == device
        finals.append(model.cpu())
    torch.testing.assert_close(finals[1], finals[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", methods.names())
def test_every_method_runs_and_resumes_on_a_gpu(name, tmp_path):
    keys = {"method": name, "model": "tiny_data:featured", "participation": 0.6, "rounds": 3, "device": "cuda"}
    if name in ("fedce", "fedga"):
        keys["validation"] = 0.25
    result = fedheal.run(quick(**keys), tmp_path / "run", progress=False)
    assert result.summary["device"].startswith("cuda")
    assert all(np.isfinite(record.train_loss) for record in result.history)
    (tmp_path / "run" / "result.json").unlink()
    again = fedheal.run(quick(**keys), tmp_path / "run", resume=True, progress=False)
    assert again.domains == result.domains


def test_two_gpu_runs_start_from_the_model_of_a_cpu_run():
    one, two = (fedheal.run(quick(rounds=1, device=d), progress=False) for d in ("cpu", "cuda"))
    assert one.history[0].train_loss == pytest.approx(two.history[0].train_loss, rel=1e-3)
