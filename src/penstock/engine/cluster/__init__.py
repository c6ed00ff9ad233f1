"""What all processes of an engine share: how they are laid out, started, watched and logged."""
