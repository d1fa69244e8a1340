"""Models: configuration, parameters, layers, heads and tokenizer."""
