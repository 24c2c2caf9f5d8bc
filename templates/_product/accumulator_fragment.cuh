// Four accumulators of a thread, in 64 rows by 8 columns: what one access moves.
struct alignas(16) Fragment { Accumulator value[4]; };
