"""SCAFFOLD: Karimireddy et al., ICML 2020.

Each step uses `g - c_m + c`. After K steps, option II has `c_m+ = c_m - c + (W - w_m) / (eta A_K)`. `A_K` accounts for
momentum and is K without it. The plain `K eta` would make c an order of magnitude too large at momentum 0.9. In option
I `c_m+` is the gradient of the client's loss at W. The server moves by `eta_g` times the aggregated update. `c` moves
by the mean of the changes of `c_m` times the share of clients present, so that `c` is the mean of the `c_m` of all M
clients. When M changes, c is rescaled: newcomers start with `c_m = 0`, and a client that took part and left counts with
its last `c_m`. Controls are of parameters only. Buffers are averaged.

`fair_controls="p"`: `c = sum_m p_m c_m` over the clients seen so far, with the weights of the model's average. An
absent client has its last weight. With uniform controls, re-weighting the average alone does not change where SCAFFOLD
converges.

`clip` bounds the corrected gradient. MarsFL, where its `preset=group` comes from, clips before it adds the controls.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from fedheal.core.layout import Layout, Packed
from fedheal.core.parameter import Parameter, declare_parameters
from fedheal.local.client_weights import COUNT, FAIR_CONTROLS, PREFIX, rescale_mean, sum_weights, update_weights
from fedheal.local.term import Arrays, Context, ServerContext, Term, add_to_gradients, check_vector

SOURCE = "Karimireddy et al. 2020"
SCAFFOLD_OPTION = Parameter(
    "option",
    2,
    "2: controls from the path taken; 1: from a full gradient",
    f"{SOURCE}; A_K for K: ours",
    choices=(1, 2),
)
SCAFFOLD_ETA_G = Parameter("eta_g", 1.0, "the server's step", f"{SOURCE}; MarsFL: 0.25", gt=0)
SCAFFOLD_CLIP = Parameter("clip", 0.0, "largest gradient norm; 0: none", f"{SOURCE}: none; MarsFL: 100", ge=0)


@declare_parameters(SCAFFOLD_OPTION, SCAFFOLD_ETA_G, FAIR_CONTROLS, SCAFFOLD_CLIP)
@dataclass(frozen=True)
class Scaffold(Term):
    """Karimireddy et al. 2020: control variates correct the drift of clients."""

    option: int = SCAFFOLD_OPTION.default
    eta_g: float = SCAFFOLD_ETA_G.default
    fair_controls: str = FAIR_CONTROLS.default
    clip: float = SCAFFOLD_CLIP.default
    sends: ClassVar[tuple[str, ...]] = ("c",)
    sums_slots = True

    @property
    def needs_sgd(self) -> str:
        return (
            "option=2 derives the mean gradient from the effective step of SGD (option=1 does not)"
            if self.option == 2
            else ""
        )

    def init(self, layout: Layout) -> Arrays:
        return {"c": torch.zeros(layout.sizes().params)}

    def prepare(self, ctx: Context, start: Packed) -> Packed:
        c, client_c = self._get_controls(ctx)
        ctx.scratch["correction"] = ctx.views(c - client_c)
        if self.option == 1:
            ctx.scratch["gradient"] = ctx.gradient(ctx.received)
        return start

    def grad(self, ctx: Context) -> None:
        add_to_gradients(ctx, ctx.scratch["correction"])

    def finish(self, ctx: Context, local: Packed) -> tuple[Arrays, Arrays]:
        c, client_c = self._get_controls(ctx)
        mean_gradient = (ctx.received.params - local.params) / ctx.effective_step
        new = ctx.scratch["gradient"] if self.option == 1 else client_c - c + mean_gradient
        return {"c": new}, {"change": new - client_c}

    def check_message(self, message: Arrays, shared: Arrays, layout: Layout) -> None:
        check_vector(message, "change", layout.sizes().params)

    def absorb(
        self, before: Packed, aggregated: Packed, messages: Sequence[Arrays], shared: Arrays, ctx: ServerContext
    ) -> tuple[Packed, Arrays]:
        model = aggregated
        if self.eta_g != 1:
            model = replace(model, params=before.params + self.eta_g * (aggregated.params - before.params))
        if not messages:
            return model, shared
        if self.fair_controls == "uniform":
            mean = torch.stack([message["change"] for message in messages]).mean(dim=0)
            c = rescale_mean(shared, "c", ctx.clients) + len(messages) / ctx.clients * mean
            return model, {"c": c, COUNT: torch.tensor(ctx.clients)}
        weights = update_weights(shared, ctx)
        total, c = sum_weights(weights), torch.zeros_like(ctx.slots[ctx.updates.clients[0]]["c"])
        for name, q in sorted(weights.items()):  # sorted: a restored state has another order, which would change sums
            c += float(q) / total * ctx.slots[name.removeprefix(PREFIX)]["c"]
        return model, {"c": c, **weights}

    def _get_controls(self, ctx: Context) -> tuple[torch.Tensor, torch.Tensor]:
        c = ctx.shared["c"].to(ctx.received.params)
        return c, ctx.slot.get("c", torch.zeros_like(c))
