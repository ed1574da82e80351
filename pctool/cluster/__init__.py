"""Read ParallelCluster configs into a ClusterView."""
