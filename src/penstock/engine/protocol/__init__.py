"""The messages between the processes of an engine, and the state that core and workers share."""
