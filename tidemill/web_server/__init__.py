"""HTTP servers of this package: connections with deadlines, bounded bodies, event streams, checks of requests."""
