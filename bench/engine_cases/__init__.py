"""What bench/engine measures: steady decoding, and the first token."""
