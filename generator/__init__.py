"""From YAML to cubins: configurations, specifications, rendering, compilation and the store.

Pure Python that runs on a machine without a GPU or a driver: nothing here imports torch,
`cuda.bindings.driver` or `warploom.runtime`.
"""
