"""The shipped YAML configurations, tuned records and their JSON schema, as package resources."""
