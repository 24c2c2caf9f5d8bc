// What becomes of scores before the mask and the softmax, one contract for both passes: begin() for a tile of a head,
// then read() for each two accumulators, side by side, and add() and hides() for each of them.
{% if hides %}
//
// Without a branch: products are in flight around loads.
__device__ __forceinline__ uint32_t load_8(const void* at, bool there) {
  uint32_t x;
  asm("{\n.reg .pred p;\nsetp.ne.s32 p, %2, 0;\nmov.b32 %0, 0;\n@p ld.global.u8 %0, [%1];\n}"
      : "=r"(x) : "l"(at), "r"(int(there)));
  return x;
}
__device__ __forceinline__ uint32_t load_16(const void* at, bool there) {
  uint32_t x;
  asm("{\n.reg .pred p;\n.reg .b16 h;\nsetp.ne.s32 p, %2, 0;\nmov.b16 h, 0;\n@p ld.global.b16 h, [%1];\n"
      "cvt.u32.u16 %0, h;\n}"
      : "=r"(x) : "l"(at), "r"(int(there)));
  return x;
}
__device__ __forceinline__ uint32_t load_32(const void* at, bool there) {
  uint32_t x;
  asm("{\n.reg .pred p;\nsetp.ne.s32 p, %2, 0;\nmov.b32 %0, 0;\n@p ld.global.b32 %0, [%1];\n}"
      : "=r"(x) : "l"(at), "r"(int(there)));
  return x;
}

// Two elements, of places that are side by side in a row or each below the other, as bits from the lowest on.
template <class Kind>
__device__ __forceinline__ uint2 load_two(const Kind* at, bool there, const Kind* other, bool other_there) {
  if constexpr (sizeof(Kind) == 4) {
    return {load_32(at, there), load_32(other, other_there)};
  } else if constexpr (!kColumnPairs) {
    if constexpr (sizeof(Kind) == 2) return {load_16(at, there), load_16(other, other_there)};
    else return {load_8(at, there), load_8(other, other_there)};
  } else {  // the pair is aligned, as rows are
    constexpr int kBits = 8 * sizeof(Kind);
    const uint32_t both = kBits == 16 ? load_32(at, there) : load_16(at, there);
    return {both & ((1u << kBits) - 1), both >> kBits};
  }
}
{% endif %}

struct Score {
{% if operation.alibi %}
  float slope;     // of the head, times -unit
  float distance;  // from the thread's first column to where its first row stands
{% endif %}
{% if hides %}
  int rows, columns;  // that are left of the sequence, from the thread's first on
{% endif %}
{% if operation.bias != "none" %}
  const BiasElement* bias;  // at the thread's first row and column
  int64_t bias_row;
  float unit;
{% endif %}
{% if operation.masked %}
  const uint8_t* shown;  // likewise: not 0 where a score counts
  int64_t shown_row;
{% endif %}
  struct Two {
    uint2 bias, shown;
  };

  // `row` and `column` are the thread's first in the sequence, of `head`; `of_1` is what 1 counts in scores.
  __device__ __forceinline__ static Score begin(const Parameters& p, const Sequence& sequence, int head, int row,
                                                int column, float of_1) {
    Score score;
{% if operation.lengths == "packed" %}
    const int64_t number = sequence.number;
{% else %}
    const int64_t number = sequence.batch;
{% endif %}
{% if operation.alibi %}
    score.slope = -of_1 * p.alibi_slopes[number * p.alibi_batch + head];
    score.distance = row + sequence.columns(p) - sequence.rows(p) - column;
{% endif %}
{% if hides %}
    score.rows = sequence.rows(p) - row;
    score.columns = sequence.columns(p) - column;
{% endif %}
{% if operation.bias != "none" %}
    score.bias = p.bias + number * p.bias_batch + head * p.bias_head + row * p.bias_row + column;
    score.bias_row = p.bias_row;
    score.unit = of_1;
{% endif %}
{% if operation.masked %}
    score.shown = p.shown + number * p.shown_batch + head * p.shown_head + row * p.shown_row + column;
    score.shown_row = p.shown_row;
{% endif %}
    return score;
  }

  // What is read for accumulators i and i + 1; 0 where the sequence ends.
  __device__ __forceinline__ Two read(int i) const {
    Two two{};
{% if hides %}
    const bool first = row_of(i) < rows && column_of(i) < columns;
    const bool second = row_of(i + 1) < rows && column_of(i + 1) < columns;
{% endif %}
{% if operation.bias != "none" %}
    two.bias = load_two(bias + row_of(i) * bias_row + column_of(i), first,
                        bias + row_of(i + 1) * bias_row + column_of(i + 1), second);
{% endif %}
{% if operation.masked %}
    two.shown = load_two(shown + row_of(i) * shown_row + column_of(i), first,
                         shown + row_of(i + 1) * shown_row + column_of(i + 1), second);
{% endif %}
    return two;
  }

  __device__ __forceinline__ float add(int i, const Two& two, float x) const {
{% if operation.alibi %}
    x = fmaf(slope, fabsf(distance + (row_of(i) - column_of(i))), x);
{% endif %}
{% if operation.bias == "fp32" %}
    x = fmaf(__uint_as_float(i % 2 ? two.bias.y : two.bias.x), unit, x);
{% elif operation.bias != "none" %}
    x = fmaf(float(BiasElement::bitcast(uint16_t(i % 2 ? two.bias.y : two.bias.x))), unit, x);
{% endif %}
    return x;
  }

  __device__ __forceinline__ bool hides(int i, const Two& two) const {
{% if operation.masked %}
    return (i % 2 ? two.shown.y : two.shown.x) == 0;
{% else %}
    return false;
{% endif %}
  }
};
