"""What families share that differentiate activations."""
