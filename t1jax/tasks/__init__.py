"""Tasks: the Harbor task directory, procedural families, datasets."""
