// To the dq of a q tile kv tiles add from left to right. Blocks wait for blocks with lower numbers only, and
// take numbers when they begin: so none waits for one that may never begin.

// The q tile in place n of [begin, end): from the last on, with which kv tiles further left begin as well.
__device__ __forceinline__ int walk(const Work& work, int n) { return work.begin + work.end - 1 - n; }

// How many kv tiles add to the dq of the q tile that begins with `row` before the block's own.
__device__ __forceinline__ int turn(const Parameters& p, const Work& work, int row) {
  // The first column that the row attends to.
  const int first = kBoundsLeft ? max(0, row + work.sequence.diagonal(p) - left(p)) : 0;
  return work.column / kKvTile - first / kKvTile;
}
