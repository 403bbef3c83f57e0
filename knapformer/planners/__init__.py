"""Planners: pure functions from lengths and homes to a RoutingPlan."""
