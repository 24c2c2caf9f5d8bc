"""Reports of one kernel: a page with its source, machine code, resources and measured times."""
