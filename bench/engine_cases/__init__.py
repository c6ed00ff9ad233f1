"""What bench/engine measures: steady decoding, and requests with images."""
