"""Measurements of Warploom beside its peers; results/ holds what they found, as JSON."""
