"""Tables whose rows live on parameter servers: embeddings that are too large for one worker."""
