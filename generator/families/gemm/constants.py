"""The constants of the model of products, by name: what each is, and where a fit begins."""

from __future__ import annotations

# Where a fit begins, and what it is drawn to where measurements do not tell: the hardware's own
# figures (H100 tuning guide, PTX ISA) at the clock of a busy H200, and round numbers.
START = {
    "launch": 5e-6,  # seconds of a launch between two events, with the first block's prologue
    "gathering": 3e-7,  # seconds more where a cluster's blocks begin together
    "latency": 1.2e-6,  # seconds from a TMA request to its data
    "tensor_clock": 1.85e9,  # of the tensor core, in Hz, where few multiprocessors multiply
    "power": 0.1,  # more of its time where all do, and the GPU is at its limit of power
    "shared_clock": 1.85e9,  # of shared memory, which has 128 bytes a cycle
    "l2_bandwidth": 2.2e11,  # bytes a second that a TPC, two multiprocessors, gets of L2
    "l2_total": 1.2e13,  # bytes a second that all of them get
    "misaligned": 0.1,  # more of its time where rows of an operand begin within its lines,
    "straddling": 0.7,  # more again where they do within its sectors,
    "overfetched": 0.4,  # and more where it fetches 256 bytes for a request of these
    "crossing": 2e13,  # bytes a second from one half of L2 to the other
    "hbm_bandwidth": 4.2e12,  # bytes a second of memory
    "written": 3e12,  # bytes a second of D to memory
    "ragged": 200.0,  # bytes more for each row of a tile of D that ends within a sector,
    "merged": 0.15,  # less of them where the next tile along the row is stored soon after
    "l2_bytes": 4e7,  # of L2 that keep an operand from being read again
    "wide": 0.03,  # more of memory's time where L2 fetches 256 bytes for a request, not 128
    "uneven": 0.3,  # of memory's time, that TPCs of two blocks wait more than those of one
    "sparse": 0.1,  # more of memory's time where no TPC has two, and fewer requests are under way
    "epilogue": 5e-7,  # seconds of an epilogue beside its bytes
    "chunk": 1e-7,  # seconds of each chunk of a tile that a consumer finishes
    "scattered": 1e-11,  # more of each element of D that swapped tiles store directly
    "exchange": 6e-7,  # seconds in which two blocks that share k find each other's sums
    "further": 6e-8,  # seconds more for each further block
    "slowest_part": 0.03,  # more of all time for each block beside the first: the slowest ends
    "exchange_bandwidth": 3e10,  # bytes a second of a tile's sums, laid down and read by others
    "parts": 3e-6,  # seconds in which clusters that share tiles find each other's parts
    "parts_bandwidth": 5e10,  # bytes a second of a part, through L2: written, or read and added
    "apart": 0.1,  # more of a step where clusters are at different k: L2 serves each by itself
    "reduction": 1.5e-6,  # seconds of a second launch that adds up parts of k, started early,
    "reduction_round": 5e-7,  # of each round of reads, which holds some parts,
    "reduction_bandwidth": 5e12,  # and bytes a second of these parts that it reads, mostly of L2
    "store_bandwidth": 1.5e11,  # bytes a second at which one multiprocessor finishes D
    "step": 1e-7,  # seconds that a k tile takes at least: barriers, products one after the other
    "turn": 2e-8,  # seconds between two k tiles that overlap with nothing
    "cluster": 1e-8,  # seconds more of it where a cluster's blocks wait for each other,
    "across": 1.5e-8,  # and more where it lies along n
    "alone": 0.1,  # more of the tensor core's time where one warpgroup has it to itself
    "integer": 1.0,  # of the tensor core's time: int8 takes less power, and clocks stay higher
    "promotion": 0.5,  # of the fp32 additions that promotion does not hide
    "scaled": 8e-8,  # seconds of a k tile in which its MMAs are waited for, to be scaled,
    "block_scaling": 1.2,  # and of the additions, by scales that a thread has in registers,
    "column_scaling": 2.8,  # or by those of single columns, which it reads from shared memory
    "transposed": 0.5,  # more shared-memory time where neither operand is K-major
}
