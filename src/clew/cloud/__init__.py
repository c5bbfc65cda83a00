"""What puts a run on a cluster of a cloud: its image and manifests."""
