"""What products of matrices share: epilogue, layouts, batches, results, references, operands."""
