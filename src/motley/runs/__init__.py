"""A run on this machine: its folder, its metrics, its peers in turn, how good they are."""
