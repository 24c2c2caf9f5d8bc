  // Adds up all parts of the warp's rows, from L2, where they were left. That is far away, so much of it is on
  // its way together: eight parts of four rows, whose maxima and sums the lanes have, each that of one row and
  // part.
  __device__ __forceinline__ void combine() const {
    constexpr int kTogether = 4, kSteps = kTogether / kRowsAtOnce, kParts = 32 / kTogether;
    constexpr int kApart = 2;
    const int own = lane() / kParts, own_row = own / kRowsAtOnce * kNext + own % kRowsAtOnce,
              lane_row = lane() / kFours;
    CUTE_NO_UNROLL
    for (int columns = 0; columns < kDim; columns += kMerged) {
      const int column = columns + lane() % kFours * 4;
      CUTE_NO_UNROLL
      for (int begin = threadIdx.x / 32 * kRowsAtOnce; begin < there; begin += kSteps * kNext) {
        float maximum = minus_infinity(), sum = 0;  // of the row that the lane has sums of
        float4 values[kSteps] = {};
        CUTE_NO_UNROLL
        for (int part = 0; part < item.parts; part += kParts) {
          float4 found[kSteps][kParts];
          const int left = item.parts - part, summed = begin + own_row, which = lane() % kParts;
          const bool is = summed < there && which < left;
          const float2 has = is ? __ldcg(p.sums + place(item.place_of(part + which), summed))
              : float2{minus_infinity(), 0};
          CUTE_UNROLL
          for (int i = 0; i < kSteps; ++i) {
            const int row = begin + i * kNext + lane_row;
            const float* const first = p.parts + place(item.place_of(part), row) * kDim + column;
            const float* const others = first - (part == 0) * p.part_rows * kDim;
            CUTE_UNROLL
            for (int j = 0; j < kParts; ++j)
              read_part(found[i][j], j == 0 ? first : others, kApart * p.part_rows * kDim * 4, j,
                        row < there ? left : 0);
          }
          const float grown = fmaxf(maximum, maximum_of<kParts>(has.x)),
                      reference = grown == minus_infinity() ? 0 : grown;
          const float before = fast_exp2(maximum - reference), factor = fast_exp2(has.x - reference);
          sum = sum * before + sum_of<kParts>(factor * has.y);
          maximum = grown;
          CUTE_UNROLL
          for (int i = 0; i < kSteps; ++i) {
            const int from = (i * kRowsAtOnce + lane_row) * kParts;
            values[i] = sum_of({0, 0, 0, 0}, __shfl_sync(~0u, before, from), values[i]);
            CUTE_UNROLL
            for (int j = 0; j < kParts; ++j)
              values[i] = sum_of(values[i], __shfl_sync(~0u, factor, from + j), found[i][j]);
          }
        }
        CUTE_UNROLL
        for (int i = 0; i < kSteps; ++i) {
          const int from = (i * kRowsAtOnce + lane_row) * kParts, row = begin + i * kNext + lane_row;
          Total total;
          total.maximum = __shfl_sync(~0u, maximum, from);
          total.sum = __shfl_sync(~0u, sum, from);
          total.value = values[i];
          if (row < there) finish(p, item, row, column, total, unit);
        }
      }
    }
  }
