"""The controller of Clusters: makes and deletes their machines."""
