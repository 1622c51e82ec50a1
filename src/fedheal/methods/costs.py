"""What each part of a method costs beyond FedAvg, in words. docs/methods.md has the measurements.

A part that is not listed costs nothing worth naming.
"""

PROTOTYPES = "sends prototypes both ways"
COSTS = {
    "scaffold": "traffic x 2; client and server keep controls as long as the model",
    "moon": "training x 1.3; client keeps its previous model",
    "feddyn": "client keeps a vector as long as the model, server two",
    "fedproc": PROTOTYPES,
    "fedproto": PROTOTYPES,
    "fccl": "training x 7 (512 public images); sends logits on them both ways; client keeps its own model",
    "fcclplus": "training x 6 (512 public images); sends logits and cosines on them both ways",
    "feddg": "training x 2.3; sends amplitude spectra of single images, which all clients receive",
    "fedsam": "training x 1.9",
    "fedlesam": "client keeps the model it last received",
    "afl": "training x 1.2 to 1.3; sends 1 number",
    "qffl": "training x 1.2 to 1.3; sends 2 numbers",
    "fedheal": "server keeps sign counts as long as the model, and 4 numbers, per client",
    "fphl": "server keeps sign counts as long as the model per client",
    "fael": "server keeps 4 numbers per client",
    "directions": "server keeps two counts as long as the model per client",
    "fedfv": "training x 1.1; sends 1 number",
    "ditto": "training x 1.8; sends and keeps a personal model",
    "fedbn": "client keeps its normalisation layers",
    "fpl": "sends prototypes, and receives those of all clients in clusters",
    "fedce": "sends 2 numbers; client keeps its last model; holds validation data out of training",
    "fedga": "sends 3 numbers; holds validation data out of training",
    "fedpw": "sends 1 number; server keeps 6 numbers per client",
    "fedism": "training x 3.5; sends 1 number",
    "fedavgm": "server keeps a vector as long as the model",
    "fedadam": "server keeps two vectors as long as the model",
    "fedyogi": "server keeps two vectors as long as the model",
    "fedadagrad": "server keeps two vectors as long as the model",
}
