collect_ignore = ["fragile"]  # an app of its own, which Flower imports
