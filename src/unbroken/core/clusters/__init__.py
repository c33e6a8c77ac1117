"""Clusters of machines: groups, scaling, software updates, checks of new nodes."""
