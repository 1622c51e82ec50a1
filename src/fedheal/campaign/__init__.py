"""Many runs: comparisons, sweeps, and the pool of processes that they run in."""
