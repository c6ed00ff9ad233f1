"""What images and videos of requests share: the bytes that a server holds of them at a time."""
