"""Train and evaluate terminal agents in JAX."""
