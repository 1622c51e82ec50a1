"""Data and models as Python objects: they run like names, are recorded by fingerprint, and must be given again."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import fedheal
import tiny_data
from fedheal import Experiment
from fedheal.runs.folder import read_toml
from fedheal.runs.schema import RoundRecord
from fedheal.simulate.objects import fingerprint_module, wrap_objects
from tiny_data import quick
from tiny_runs import get_model_bytes


def run(out: Path | None = None, resume: bool = False, callbacks: Any = (), **keys: Any) -> fedheal.Result:
    return fedheal.run(quick(rounds=2, **keys), out, resume=resume, callbacks=callbacks, progress=False)


class Stop(fedheal.Callback):
    def round(self, record: RoundRecord) -> None:
        raise KeyboardInterrupt


def build_from_shape(num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    channels, height, width = input_shape
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, num_classes))


def build_from_keywords(classes: int, depth: int = 1, *, input_shape: tuple[int, ...] = ()) -> nn.Module:
    assert depth == 1
    return build_from_shape(classes, input_shape)


def build_without_arguments() -> nn.Module:
    return build_from_shape(3, (3, 8, 8))


def test_data_as_an_object_or_a_function_give_the_run_of_their_name() -> None:
    named = run()
    for data in (tiny_data.load(), tiny_data.load):
        by_object = run(data=data)
        assert get_model_bytes(by_object.model) == get_model_bytes(named.model)
        assert by_object.domains == named.domains
        assert by_object.summary["data_fingerprint"] == named.summary["data_fingerprint"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        tiny_data.linear,
        build_from_shape,
        build_from_keywords,
        partial(build_from_keywords, depth=1),
        build_without_arguments,
    ],
)
def test_a_function_builds_the_model_by_the_seed(model: Any) -> None:
    assert get_model_bytes(run(model=model).model) == get_model_bytes(run().model)
    assert get_model_bytes(run(model=model, seed=1).model) == get_model_bytes(run(seed=1).model)


def test_the_package_s_own_builders_take_their_width() -> None:
    experiment = Experiment(model=fedheal.models.SmallCNN, width=16)
    assert experiment.model_object is not None
    assert experiment.model_object.build(10, (3, 32, 32), width=16).feature_size == 4 * 16 * 16


def test_a_module_is_where_every_run_starts_and_stays_as_it_is() -> None:
    torch.manual_seed(5)
    module = tiny_data.linear(3)
    before = get_model_bytes(module)
    first, other = run(model=module, lr=1e-12), run(model=module, lr=1e-12, seed=1)
    for result in (first, other):
        for name, value in result.model.state_dict().items():
            torch.testing.assert_close(value, module.state_dict()[name])
    assert get_model_bytes(module) == before
    experiment = quick(model=module)
    nn.init.zeros_(module[1].weight)  # as if the caller went on training it
    assert experiment.model != quick(model=module).model
    assert experiment.model_object.build(3, None)[1].weight.abs().sum() > 0


def test_a_file_has_descriptions_which_change_with_the_object(tmp_path: Path) -> None:
    data, module = tiny_data.load(), tiny_data.linear(3)
    run(tmp_path / "run", data=data, model=module)
    written = read_toml(tmp_path / "run" / "experiment.toml")
    experiment = quick(rounds=2, data=data, model=module)
    assert (written["data"], written["model"]) == (experiment.data, experiment.model)
    assert written["data"].startswith("tiny@")
    assert written["model"].startswith("Sequential@")
    assert Experiment.of(written).identity == experiment.identity
    others = [
        replace(data, clients_per_domain=(1, 1, 1)),
        replace(data, domains=data.domains[:2][::-1] + data.domains[2:]),
    ]
    assert len({experiment.data, *(quick(data=other).data for other in others)}) == 3
    assert quick(model=nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(192, 3))).model != experiment.model
    assert quick(data=tiny_data.load).data == experiment.data
    assert quick(data=data, model=module) == quick(data=tiny_data.load, model=module)


def test_a_run_resumes_with_the_same_object_only(tmp_path: Path) -> None:
    data, whole = tiny_data.load(), run(data=tiny_data.load(), model=build_from_shape)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", callbacks=[Stop()], data=data, model=build_from_shape, save_seconds=0)
    with pytest.raises(ValueError, match="belongs to another experiment"):
        run(tmp_path / "run", True, data=replace(data, clients_per_domain=(1, 1, 1)), model=build_from_shape)
    with pytest.raises(ValueError, match="belongs to another experiment"):
        run(tmp_path / "run", True, data=data, model=build_from_keywords)
    resumed = run(tmp_path / "run", True, data=data, model=build_from_shape)
    assert get_model_bytes(resumed.model) == get_model_bytes(whole.model)
    again = run(tmp_path / "run", True, data=data, model=build_from_shape)  # finished
    assert get_model_bytes(again.model) == get_model_bytes(whole.model)


def test_a_function_that_builds_something_else_now_does_not_resume(tmp_path: Path) -> None:
    sizes = {"middle": 16}

    def build_model(classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(192, sizes["middle"]), nn.Linear(sizes["middle"], classes))

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", callbacks=[Stop()], model=build_model, save_seconds=0)
    sizes["middle"] = 17
    with pytest.raises(ValueError, match=r"the model of .*run has changed since it was begun"):
        run(tmp_path / "run", True, model=build_model)
    sizes["middle"] = 16
    run(tmp_path / "run", True, model=build_model)
    sizes["middle"] = 17
    with pytest.raises(ValueError, match=r"the model of .*run has changed"):
        run(tmp_path / "run", True, model=build_model)


def test_a_description_alone_does_not_run_and_loads_into_a_module(tmp_path: Path) -> None:
    result = run(tmp_path / "run", data=tiny_data.load, model=build_from_shape)
    experiment = Experiment.read(tmp_path / "run" / "experiment.toml")
    with pytest.raises(ValueError, match=r"data = 'tiny@\w+' describes a Python object: .*Experiment\(data=\.\.\.\)"):
        fedheal.run(experiment, progress=False)
    with pytest.raises(ValueError, match=r"model = 'build_from_shape@\w+' describes a Python object"):
        run(model=experiment.model)
    with pytest.raises(ValueError, match=r"was a Python object, build_from_shape@\w+: give load\(folder, module\)"):
        fedheal.load(tmp_path / "run")
    assert get_model_bytes(fedheal.load(tmp_path / "run", tiny_data.linear(3))) == get_model_bytes(result.model)


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"data": tiny_data.failing}, "the data set's function 'failing' raised KeyError"),
        ({"data": lambda: 3}, r"'<lambda>' must return a fedheal\.data\.domains\.Domains, got int"),
        ({"data": 3}, "data = 3: give a data set's name, a Domains, or a function"),
        ({"model": 3}, "model = 3: give a model's name"),
        ({"model": tiny_data.leaving}, r"the model's function 'leaving@\w+' raised SystemExit: 3"),
        ({"model": tiny_data.unable}, r"the model's function 'unable@\w+' raised RuntimeError: no weights here"),
        ({"model": lambda n: n}, r"the model's function '.*lambda.*@\w+' returned an int, not a torch\.nn\.Module"),
        (
            {"model": lambda a, b, c: build_without_arguments()},
            r"raised TypeError: .*missing 1 required positional argument",
        ),
        ({"model": tiny_data.lazy(3)}, "model 'Sequential' has lazy layers"),
        (
            {"model": tiny_data.linear(3), "width": 16},
            r"width = 16: the model Sequential@\w+ is a module; leave it out",
        ),
        ({"model": tiny_data.linear(2)}, "has 2 outputs, but the data set has 3 classes"),
        ({"data": tiny_data.load, "image_size": 16}, "image_size = 16: the images of 'tiny@"),
    ],
)
def test_an_object_that_does_not_do_is_a_sentence(keys: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why) as error:
        run(**keys)
    assert "\n" not in str(error.value)


def test_a_module_that_refuses_to_be_copied_is_a_sentence() -> None:
    class NotCopyable(nn.Linear):
        def __deepcopy__(self, memo: Any) -> nn.Module:
            raise RuntimeError("not me")

    with pytest.raises(
        ValueError, match=r"model 'NotCopyable' cannot be copied \(RuntimeError: not me\): give a function"
    ):
        quick(model=NotCopyable(2, 3))


def test_an_address_in_a_module_s_text_does_not_change_its_description() -> None:
    class WithAddress(nn.Sequential):
        def extra_repr(self) -> str:
            return f"made by {object()}"

    assert quick(model=WithAddress(*tiny_data.linear(3))).model != quick(model=WithAddress(*tiny_data.linear(3))).model
    layers = tiny_data.linear(3)
    assert quick(model=WithAddress(*layers)).model == quick(model=WithAddress(*layers)).model


def test_a_model_that_does_not_cross_processes_is_refused_with_the_remedy() -> None:
    class Local(nn.Sequential):
        pass

    with pytest.raises(ChildProcessError, match="workers=1"):
        run(model=Local(*tiny_data.linear(3)), workers=2)


def test_a_result_is_one_line_and_a_data_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(tmp_path / "run", method="fedavg")
    numbers = f"AVG {result.avg:.2f}, STD {result.std:.2f}, worst {result.worst:.2f}"
    assert repr(result) == f"<Result fedavg: {numbers}, 2 rounds, {tmp_path / 'run'}>"
    assert repr(run(method="fedavg")).endswith("2 rounds>")
    records: list[list[dict[str, Any]]] = []
    frame = SimpleNamespace(from_records=records.append)
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=frame))  # type: ignore[arg-type]
    result.to_pandas()
    assert [record["round"] for record in records[0]] == [1, 2]
    assert list(records[0][0]) == ["round", "plain", "noisy", "dark", "avg", "std", "worst"]
    monkeypatch.setitem(sys.modules, "pandas", None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a data frame needs pandas: pip install pandas"):
        result.to_pandas()


def test_what_is_written_at_a_prompt_is_known_by_its_code() -> None:
    """Code at a prompt has no source; each function has other code, and the networks have the same structure and values."""
    descriptions = set()
    for body in (
        "self.layer(x)",
        "2 * self.layer(x)",
        "self.layer(x) + (lambda: 1)()",
        "self.layer(x) + (lambda: 2)()",
    ):
        names: dict[str, Any] = {"nn": nn}
        code = "class Net(nn.Module):\n def __init__(self):\n  super().__init__()\n  self.layer = nn.Identity()\n"
        exec(f"{code} def forward(self, x): return {body}\ndef build(classes): return {body!r}", names)
        descriptions.add(wrap_objects({"model": names["build"]})["model"].description)
        net = nn.Sequential(names["Net"](), nn.Linear(2, 2))
        nn.init.zeros_(net[1].weight)
        nn.init.zeros_(net[1].bias)
        descriptions.add(fingerprint_module(net))
    assert len(descriptions) == 8
