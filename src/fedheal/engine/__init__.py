"""Engines train a cohort's clients from the global model and evaluate the global model. `serial` is the obvious one."""
