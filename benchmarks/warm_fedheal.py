"""fedheal imported and its kernels compiled: forks of a process that has imported this start in milliseconds."""

from __future__ import annotations

import torch

import fedheal
import fedheal.campaign.pool
import fedheal.cli.app
import fedheal.cli.display
import fedheal.engine.workers
import fedheal.report.html_page
from tiny_data import quick

torch.set_num_threads(1)  # threads do not survive a fork
for method in ("fedavg", "fedheal"):
    fedheal.run(quick(rounds=1, method=method), progress=False)
