"""The output processors: they turn tokens into text and into the chunks of a streamed answer."""
