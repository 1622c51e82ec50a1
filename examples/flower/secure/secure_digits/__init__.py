"""Digits of four domains, one site a partition, in Flower with secure aggregation."""
