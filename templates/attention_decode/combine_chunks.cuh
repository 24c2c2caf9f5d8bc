  // Adds up all chunks of the warp's rows in their order, of so many steps from row to row at a time: those
  // that one CTA did from the first on have been, and lie where the first one does. From L2, where they were
  // left; much of it is on its way together: eight chunks of these rows, whose maxima and sums the lanes have,
  // each that of one row and chunk.
  template <int kSteps> __device__ __forceinline__ void combine(const Sharing& sharing) const {
    constexpr int kParts = 8;
    const int self = as_new(lane()), own = self / kParts, which = self % kParts, lane_row = self / kFours;
    const int own_row = own / kRowsAtOnce * kNext + own % kRowsAtOnce;
    const int apart = as_new(p.part_rows);  // rows, from a chunk to the next
    CUTE_NO_UNROLL
    for (int columns = 0; columns < kDim; columns += kMerged) {
      const int column = columns + self % kFours * 4;
      CUTE_NO_UNROLL
      for (int begin = threadIdx.x / 32 * kRowsAtOnce; begin < there; begin += kSteps * kNext) {
        const int summed = min(begin + own_row, there - 1);  // the row that the lane has sums of
        const float2* const sums = p.sums + place_of(0, summed);
        const float* from[kSteps];
        float4 values[kSteps];
        CUTE_UNROLL
        for (int i = 0; i < kSteps; ++i) {
          from[i] = p.parts + place_of(0, min(begin + i * kNext + lane_row, there - 1)) * kDim + column;
          values[i] = __ldcg(reinterpret_cast<const float4*>(from[i]));
        }
        float2 total = __ldcg(sums + (sharing.added - 1) * apart);  // maximum and sum
        CUTE_NO_UNROLL
        for (int part = sharing.added; part < sharing.parts; part += kParts) {
          const int left = sharing.parts - part;
          const float2 has = which < left ? __ldcg(sums + (part + which) * apart) : float2{minus_infinity(), 0};
          float4 found[kSteps][kParts];
          CUTE_UNROLL
          for (int i = 0; i < kSteps; ++i)
            CUTE_UNROLL
            for (int j = 0; j < kParts; ++j)
              read_part(found[i][j], from[i], apart * kDim * 4, part + j, sharing.parts);
          // Of the maximum of all up to the lane's chunk, and of all before that.
          const float grown = largest_up_to<kParts>(which, fmaxf(total.x, has.x));
          const float lower = __shfl_up_sync(~0u, grown, 1), reference = grown == minus_infinity() ? 0 : grown;
          const float before = fast_exp2((which == 0 ? total.x : lower) - reference),
                      factor = fast_exp2(has.x - reference);
          const float sum = __fmul_rn(factor, has.y);
          CUTE_UNROLL
          for (int j = 0; j < kParts; ++j) {
            const int lane_of_own = own * kParts + j;
            total.y = __fmaf_rn(total.y, __shfl_sync(~0u, before, lane_of_own),
                                __shfl_sync(~0u, sum, lane_of_own));
            CUTE_UNROLL
            for (int i = 0; i < kSteps; ++i) {
              const int of = (i * kRowsAtOnce + lane_row) * kParts + j;
              values[i] = appended(values[i], __shfl_sync(~0u, before, of), __shfl_sync(~0u, factor, of),
                                   found[i][j]);
            }
          }
          total.x = __shfl_sync(~0u, grown, own * kParts + kParts - 1);
        }
        CUTE_UNROLL
        for (int i = 0; i < kSteps; ++i) {
          const int of = (i * kRowsAtOnce + lane_row) * kParts, row = begin + i * kNext + lane_row;
          const Total all({__shfl_sync(~0u, total.x, of), __shfl_sync(~0u, total.y, of)}, values[i]);
          if (row < there) finish(p, item, row, column, all, unit);
        }
      }
    }
  }
