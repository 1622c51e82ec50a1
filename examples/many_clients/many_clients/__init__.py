"""Very many clients with synthetic data of their own.

    flwr run . --stream --federation-config "num-supernodes=2000 client-resources-num-cpus=1"

On the server FPHL would need a byte per client and parameter. Here each client keeps its own sign counts and masks its own
update (`placement="client"`), and the server keeps four numbers per client that has ever taken part.
"""
