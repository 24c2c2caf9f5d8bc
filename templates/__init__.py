"""The Jinja templates and C++ parts that kernels are rendered from, as package resources."""
