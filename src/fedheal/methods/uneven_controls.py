"""Methods whose average weights clients unequally, while the controls of SCAFFOLD or FedDyn weight them equally."""

from fedheal.aggregate import Stage
from fedheal.local.feddyn import FedDyn
from fedheal.local.scaffold import Scaffold
from fedheal.methods.registry import Method


def explain_uneven_controls(method: Method) -> str:
    """Return why training with a method may fail, or an empty string if its controls and its average agree.

    Args:
        method: The method, made by `fedheal.methods.get`; the parts of others are not known.

    >>> from fedheal import methods
    >>> explain_uneven_controls(methods.get("scaffold+fedheal"))
    "the weights of 'fedheal' do not apply to the controls of 'scaffold', so training can fail"
    >>> explain_uneven_controls(methods.get("scaffold:fair_controls=p+fedheal"))
    ''
    """
    controls = [term.fair_controls for term in method.local if isinstance(term, Scaffold | FedDyn)]
    if "uniform" not in controls or not method.parts:
        return ""
    local, *others = method.parts
    stages = {part.name: part.build() for part in others if part.name != "uniform"}
    uneven = [name for name, stage in stages.items() if isinstance(stage, Stage) and "weights" in stage.gives]
    if not uneven:
        return ""
    return f"the weights of '{uneven[0]}' do not apply to the controls of '{local.name}', so training can fail"
