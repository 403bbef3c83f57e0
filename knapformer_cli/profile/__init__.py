"""What a data mix loses to stragglers on a cluster, and which layout mends it."""
