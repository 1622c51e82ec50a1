"""FedDyn: Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021.

Client: minimise `f_m(w) - <g_m, w> + alpha/2 |w - W|^2`, then `g_m -= alpha (w_m - W)`. Server:
`h -= alpha/M sum_S (w_m - W)` and `W+ = mean_S w_m - h / alpha`. As in the authors' code the plain average is evaluated
(`eval_model="average"`), not the corrected model that is broadcast. Gradients are clipped at norm 10. Here that is the
whole sum. There it is without `alpha w`, which their optimiser adds as weight decay. Buffers are averaged, never
corrected. `h` is the mean of the `g_m` of all M clients. When M changes, h is rescaled: newcomers start with `g_m = 0`,
and a client that took part and left counts with its last `g_m`.

`fair_controls="p"`: `h -= alpha sum_S p_m (w_m - W)`, p the weights of the model's average as shares of all clients
seen so far, each as it last was. When clients join, the others' shares shrink. So does h, which is a sum over the
others. With a uniform h, re-weighting the average alone does not change where FedDyn converges.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fedheal.core.layout import Layout, Packed
from fedheal.core.parameter import Parameter, declare_parameters
from fedheal.local.client_weights import COUNT, FAIR_CONTROLS, rescale_mean, share_out_weights
from fedheal.local.term import Arrays, Context, ServerContext, Term, add_proximal_gradient, add_to_gradients

RELEASED = "Acar et al. 2021, released code"
MODELS = ("average", "broadcast")
FEDDYN_ALPHA = Parameter(
    "alpha", 0.01, "strength of the dynamic regulariser", "Acar et al. 2021, CIFAR-10 (0.001 to 0.1); MarsFL", gt=0
)
FEDDYN_EVAL_MODEL = Parameter("eval_model", "average", "which model is evaluated", RELEASED, choices=MODELS)
FEDDYN_CLIP = Parameter("clip", 10.0, "largest gradient norm; 0: none", RELEASED, ge=0)


@declare_parameters(FEDDYN_ALPHA, FEDDYN_EVAL_MODEL, FAIR_CONTROLS, FEDDYN_CLIP)
@dataclass(frozen=True)
class FedDyn(Term):
    """Acar et al. 2021: a dynamic regulariser pulls each client's optimum to the global one."""

    alpha: float = FEDDYN_ALPHA.default
    eval_model: str = FEDDYN_EVAL_MODEL.default
    fair_controls: str = FAIR_CONTROLS.default
    clip: float = FEDDYN_CLIP.default
    sums_slots = True

    def init(self, layout: Layout) -> Arrays:
        return {"h": torch.zeros(layout.sizes().params)}

    def prepare(self, ctx: Context, start: Packed) -> Packed:
        ctx.scratch["anchor"] = ctx.views(ctx.received.params)
        ctx.scratch["g"] = ctx.views(self._get_linear_term(ctx))
        return start

    def grad(self, ctx: Context) -> None:
        add_to_gradients(ctx, ctx.scratch["g"], -1.0)
        add_proximal_gradient(ctx, ctx.scratch["anchor"], self.alpha)

    def finish(self, ctx: Context, local: Packed) -> tuple[Arrays, Arrays]:
        return {"g": self._get_linear_term(ctx) - self.alpha * (local.params - ctx.received.params)}, {}

    def absorb(
        self, before: Packed, aggregated: Packed, messages: Sequence[Arrays], shared: Arrays, ctx: ServerContext
    ) -> tuple[Packed, Arrays]:
        deltas = ctx.updates.deltas
        if not len(deltas):
            return aggregated, shared
        if self.fair_controls == "p":
            known_share, u, kept = share_out_weights(shared, ctx)
            h, rate = known_share * shared["h"].to(before.params), self.alpha
        else:
            u, rate = torch.full_like(ctx.weights, 1 / len(deltas)), self.alpha * (len(deltas) / ctx.clients)
            h, kept = rescale_mean(shared, "h", ctx.clients).to(before.params), {COUNT: torch.tensor(ctx.clients)}
        h = h - rate * (u.to(deltas)[:, None] * deltas).sum(dim=0)
        corrected = replace(aggregated, params=aggregated.params - h / self.alpha)
        return corrected, {"h": h, "average": aggregated.params, **kept}

    def evaluated(self, model: Packed, shared: Arrays, slots: Mapping[str, Arrays]) -> Packed:
        if self.eval_model == "broadcast" or "average" not in shared:
            return model
        return replace(model, params=shared["average"].to(model.params))

    def _get_linear_term(self, ctx: Context) -> torch.Tensor:
        return ctx.slot.get("g", torch.zeros_like(ctx.received.params))
