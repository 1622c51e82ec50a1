"""Fair aggregation in an NVFLARE federation: a controller, an aggregator for the stock FedAvg workflow, a helper for sites.

Add the controller to a job::

    from fedheal.nvflare import FairController
    job.to_server(FairController("fedheal", model="net:Net", num_rounds=100, folder="/srv/runs/hospitals"))

`site_rounds.py` has what controller and aggregator share, `exchange.py` what travels in the messages, `client.py` the sites.
"""

from fedheal.core.errors import explain_install

try:
    import nvflare.apis.fl_component  # noqa: F401
except ImportError as error:
    message = f"fedheal.nvflare needs NVFLARE ({error}): {explain_install('nvflare')}"
    raise ImportError(message, name=error.name) from None

from fedheal.nvflare.aggregator import FairModelAggregator
from fedheal.nvflare.controller import FairController
from fedheal.nvflare.persistor import FolderPersistor, count_finished_rounds

__all__ = ["FairController", "FairModelAggregator", "FolderPersistor", "count_finished_rounds"]
