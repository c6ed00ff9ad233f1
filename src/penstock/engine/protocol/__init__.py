"""What crosses between the processes of an engine, and the state that they keep alike."""
