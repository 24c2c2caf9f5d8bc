// ---- Masks of keys: one row for all rows of q --------------------------------------------------------
// What a row shows: nothing outside of columns [begin, end), and all of these if `count` is as many.
struct Keys {
  int begin, end, count;

  // Adds the thread's part of a row of the mask.
  __device__ __forceinline__ void add(const uint8_t* shown, int columns) {
    CUTE_NO_UNROLL
    for (int column = threadIdx.x * 16; column < columns; column += blockDim.x * 16) {
      uint32_t words[4] = {0, 0, 0, 0};
      if (columns - column >= 16) {
        const uint4 sixteen = *reinterpret_cast<const uint4*>(shown + column);
        words[0] = sixteen.x, words[1] = sixteen.y, words[2] = sixteen.z, words[3] = sixteen.w;
      } else {
        CUTE_UNROLL
        for (int i = 0; i < 15; ++i)
          if (column + i < columns) words[i / 4] |= uint32_t(shown[column + i]) << i % 4 * 8;
      }
      uint32_t bits = 0;  // of truth values, which are any number but 0
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) bits |= (__vsetne4(words[i], 0) * 0x10204080u >> 28) << 4 * i;
      if (bits == 0) continue;
      begin = min(begin, column + __ffs(bits) - 1);
      end = max(end, column + 32 - __clz(bits));
      count += __popc(bits);
    }
  }

  // Adds the warp's parts to the CTA's, which nobody reads before all have.
  __device__ __forceinline__ void join(Keys& block) const {
    const int first = __reduce_min_sync(~0u, begin), last = __reduce_max_sync(~0u, end);
    const int all = __reduce_add_sync(~0u, count);
    if (threadIdx.x % 32 != 0) return;
    atomicMin(&block.begin, first);
    atomicMax(&block.end, last);
    atomicAdd(&block.count, all);
  }
};

// Finds what a row of the mask shows, by all threads of a CTA, for the next kernel to read: nothing outside of
// columns [x, y), and all of [z, w).
__device__ __forceinline__ void find_keys(const Parameters& p, int row) {
  __shared__ Keys keys;
  if (threadIdx.x == 0) keys = {p.keys_columns, 0, 0};
  __syncthreads();
  const int batch = p.keys_batch == 0 ? 0 : row / p.keys_batch, head = row - batch * p.keys_batch;
  Keys own{p.keys_columns, 0, 0};
  own.add(p.shown + batch * p.shown_batch + head * p.shown_head, p.keys_columns);
  own.join(keys);
  __syncthreads();
  if (threadIdx.x != 0) return;
  const int begin = min(keys.begin, keys.end);
  p.keys[row] = make_int4(begin, keys.end, begin, keys.count == keys.end - begin ? keys.end : begin);
}

// What the row of a query head shows.
__device__ __forceinline__ int4 keys_of(const Parameters& p, int64_t number, int head) {
  return p.keys[int(number) * p.keys_batch + head * p.keys_head];
}
