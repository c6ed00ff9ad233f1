"""The inference engine: what its processes tell each other, and the state that they keep alike."""
