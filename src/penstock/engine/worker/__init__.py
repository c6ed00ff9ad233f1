"""The workers: one process per tensor-parallel rank, which run the model."""
