"""What runs on compute nodes: launch, watch, and the channel between launches."""
