"""The engine core: one process per data-parallel rank, which schedules."""
