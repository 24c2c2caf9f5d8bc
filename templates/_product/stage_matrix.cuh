  // stmatrix writes 16 x 16 elements of 16 bits; lanes 0-15 address the left 8 columns, 16-31 the right.
  __device__ __forceinline__ void stage(uint8_t* buffer, Value (&x)[kFragments][2][2]) const {
    const int lane = thread % 32, row = thread / 32 * 16 + lane % 16;
    CUTE_UNROLL
    for (int f = 0; f < kFragments; f += 2) {
      const uint32_t address = cute::cast_smem_ptr_to_uint(buffer) + swizzled(row, f * 16 + lane / 16 * 16);
      const Pair pairs[4] = {converted(x[f][0]), converted(x[f][1]), converted(x[f + 1][0]),
                             converted(x[f + 1][1])};
      const auto& words = reinterpret_cast<const uint32_t(&)[4]>(pairs);
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], { %1, %2, %3, %4};" ::"r"(address),
                   "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]));
    }
  }
