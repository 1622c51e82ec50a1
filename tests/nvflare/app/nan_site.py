"""A site that sends NaN, or, if it is called `failing-0`, raises from round 2 on; numpy only, so that it starts quickly."""

import numpy as np


def main() -> None:
    import nvflare.client as flare

    flare.init()
    while flare.is_running():
        received = flare.receive()
        if received is None:
            break
        if flare.get_site_name() == "failing-0" and received.current_round >= 1:
            raise RuntimeError("this site has lost its data")
        params = {
            name: np.full_like(values, np.nan) if values.ndim else values for name, values in received.params.items()
        }
        meta = {"NUM_STEPS_CURRENT_ROUND": 100}
        flare.send(flare.FLModel(params=params, metrics={"accuracy": float("nan")}, meta=meta))


if __name__ == "__main__":
    main()
