"""Local training as a sum of terms: `term` has the interface, and each method's term is in a module of its name."""
