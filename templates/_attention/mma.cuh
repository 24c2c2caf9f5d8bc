// Of a warp, 16 rows by 16 by 8 columns (PTX ISA, mma.m16n8k16): lane l has, of a, rows l / 4 and 8 below and of each
// columns 2 (l % 4) and the next, and 8 to the right; of b, the same columns' rows of column l / 4; of d, rows as of a
// and columns 2 (l % 4) and the next.
__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t low, uint32_t high) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.{{ ptx_type }}.{{ ptx_type }}.f32 { %0, %1, %2, %3}, { %4, %5, %6, %7}, { %8, %9}, "
      "{ %0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(low), "r"(high));
}
