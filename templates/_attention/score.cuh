// What is added to scores, or hides them, before the softmax: a Score for a tile of a head
{%- if reads %}, then read() for each eight accumulators{% endif %}
{{- ", then term() for each accumulator" if operation.bias != "none" else ", then add() for each accumulator" if adds }}
{{- ", then hides() for each accumulator" if operation.masked }}.
{% if staged %}
//
// A bias of 16 bits and a mask come by shared memory: stage() begins to copy what a warp has of a tile, kStagedRows
// rows of kStagedColumns, while it works on the tile before; await() waits for them. A warp stages for itself
// alone: no other waits for it.
{% endif %}
{% if operation.bias == "fp32" %}
//
// Without a branch: products are in flight around loads.
__device__ __forceinline__ uint32_t load(const float* at, bool there) {
  uint32_t x;
  asm("{\n.reg .pred p;\nsetp.ne.s32 p, %2, 0;\nmov.b32 %0, 0;\n@p ld.global.b32 %0, [%1];\n}"
      : "=r"(x) : "l"(at), "r"(int(there)));
  return x;
}
{% endif %}
{% if staged %}
// What a warp stages of elements of kBytes: rows by pieces of 16 bytes. No two of 8 rows begin in the same banks.
template <int kBytes> struct Staged {
  static constexpr int kPieces = kStagedColumns * kBytes / 16, kPitch = (kPieces | 1) * 16;
  static constexpr int kRows = (kStagedRows + 15) / 16 * 16;  // what ldmatrix names; the last 8 may be of nobody
  // Lanes side by side, and rows that all of them copy at a time.
  static constexpr int kLanes = kPieces > 8 ? 16 : kPieces > 4 ? 8 : kPieces > 2 ? 4 : kPieces;
  static constexpr int kRowsAtATime = 32 / kLanes;
  uint8_t bytes[kRows * kPitch];

  // Begins to copy from the warp's first row and column, of which there are `rows` and `columns`; the rest is zeros.
  __device__ __forceinline__ void copy(const void* from, int64_t pitch, int rows, int columns) {
    const int row = threadIdx.x % 32 / kLanes, piece = threadIdx.x % kLanes;
    const uint32_t to = cute::cast_smem_ptr_to_uint(bytes) + row * kPitch + piece * 16;
    CUTE_UNROLL
    for (int p = 0; p < kPieces; p += kLanes) {
      if (kPieces % kLanes != 0 && p + piece >= kPieces) continue;
      const auto* at = static_cast<const uint8_t*>(from) + (p + piece) * 16 + row * pitch * kBytes;
      const int left = max(0, min(16, columns * kBytes - (p + piece) * 16));
      CUTE_UNROLL
      for (int r = 0; r < kStagedRows; r += kRowsAtATime, at += kRowsAtATime * kBytes * pitch) {
        if (kStagedRows % kRowsAtATime != 0 && row + r >= kStagedRows) continue;
        // By L1, in which the one row of a mask of columns stays: all blocks ask for it.
        asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;"
                     ::"r"(to + r * kPitch + p * 16), "l"(at), "r"(row + r < rows ? left : 0)
                     : "memory");
      }
    }
  }

{% if operation.bias in ("fp16", "bf16") %}
  // Elements of 16 bits of accumulators i to i + 7, by twos.
  __device__ __forceinline__ uint4 read_eight(int i) const {
    uint4 x;
    const int lane = threadIdx.x % 32;
    const uint32_t at = cute::cast_smem_ptr_to_uint(bytes);
{% if column_pairs %}
    // Rows 0 and 8 of 8 columns, then of the next 8.
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3 }, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(at + lane % 16 * kPitch + lane / 16 * 16 + i / 8 * 32));
{% else %}
    // Columns 0 and 8 of 8 rows, then of the next 8.
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 { %0, %1, %2, %3 }, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(at + (lane / 16 * 8 + lane % 8) * kPitch + lane / 8 % 2 * 16 + i / 8 * 16 * kPitch));
{% endif %}
    return x;
  }
{% endif %}
{% if operation.masked %}

  // Bytes of accumulators i to i + 7, each in bits that are its own: 0 or not.
  __device__ __forceinline__ void read_bytes(uint32_t (&x)[8], int i) const {
    const int lane = threadIdx.x % 32;
{% if column_pairs %}
    const uint32_t pair = lane % 4 * 0x22 + 0x10;  // of the bytes of 8 columns, the thread's two
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const uint4 row = *reinterpret_cast<const uint4*>(bytes + (lane / 4 + 8 * r) * kPitch + i / 8 * 16);
      const uint32_t left = __byte_perm(row.x, row.y, pair), right = __byte_perm(row.z, row.w, pair);
      x[2 * r] = left & 0xff, x[2 * r + 1] = left & 0xff00;
      x[2 * r + 4] = right & 0xff, x[2 * r + 5] = right & 0xff00;
    }
{% else %}
    const uint8_t* first = bytes + lane % 4 * 2 * kPitch + lane / 4;
    CUTE_UNROLL
    for (int j = 0; j < 8; ++j)
      x[j] = kScores > i + j ? first[row_of(i + j) * kPitch + column_of(i + j)] : 0;
{% endif %}
  }
{% endif %}
};
struct Staging {
{% if operation.bias in ("fp16", "bf16") %}
  alignas(16) Staged<2> bias;
{% endif %}
{% if operation.masked %}
  alignas(16) Staged<1> shown;
{% endif %}
};
{% endif %}

struct Score {
{% for part in parts %}{% include part ~ "#score_members" ignore missing %}{% endfor %}
{% if operation.bias == "fp32" %}
  int rows, columns;  // that are left of the sequence, from the thread's first on
  const float* bias;  // at the thread's first row and column
  int64_t bias_row;
{% endif %}
{% if staged %}
  const Staging& staging;
{% endif %}
{% if reads %}
  struct Eight {
    uint32_t {{ "bias[8]" if operation.bias != "none" }}{{ ", " if operation.bias != "none" and operation.masked }}{{ "shown[8]" if operation.masked }};
  };
{% endif %}

{% if operation.bias != "none" %}
  // `row` and `column` are the thread's first in the sequence, of `head`.
  __device__ __forceinline__ Score(const Parameters& p, {{ "const Staging& staging, " if staged }}const Sequence& sequence,
                                   int head, int row, int column)
{% else %}
  // `row` and `column` are the thread's first in the sequence, of `head`; `of_1` is what 1 counts in scores.
  __device__ __forceinline__ Score(const Parameters& p, {{ "const Staging& staging, " if staged }}const Sequence& sequence,
                                   int head, int row, int column, float of_1)
{% endif %}
{% if staged %}
      : staging(staging)
{% endif %}
  {
{% for part in parts %}{% include part ~ "#score_begin" ignore missing %}{% endfor %}
{% if operation.bias == "fp32" %}
    rows = sequence.rows(p) - row;
    columns = sequence.columns(p) - column;
    bias = p.bias + number_of(sequence) * p.bias_batch + head * p.bias_head + row * p.bias_row + column;
    bias_row = p.bias_row;
{% endif %}
  }

  __device__ __forceinline__ static int64_t number_of(const Sequence& sequence) {
    return sequence.{{ "number" if operation.lengths == "packed" else "batch" }};
  }
{% if staged %}

  // `row` and `column` are the warp's first of the tile.
  __device__ __forceinline__ static void stage(const Parameters& p, Staging& staging, const Sequence& sequence,
                                               int head, int row, int column) {
    const int rows = sequence.rows(p) - row, columns = sequence.columns(p) - column;
{% if operation.bias in ("fp16", "bf16") %}
    staging.bias.copy(p.bias + number_of(sequence) * p.bias_batch + head * p.bias_head + row * p.bias_row + column,
                      p.bias_row, rows, columns);
{% endif %}
{% if operation.masked %}
    staging.shown.copy(
        p.shown + number_of(sequence) * p.shown_batch + head * p.shown_head + row * p.shown_row + column,
        p.shown_row, rows, columns);
{% endif %}
  }
  __device__ __forceinline__ static void await() {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
  }
{% endif %}
{% if reads %}

  // What is read for accumulators i to i + 7; 0 where the sequence ends.
  __device__ __forceinline__ Eight read(int i) const {
    Eight eight;
{% if operation.bias == "fp32" %}
    CUTE_UNROLL
    for (int j = i; j < min(i + 8, kScores); ++j)
      eight.bias[j - i] = load(bias + row_of(j) * bias_row + column_of(j), row_of(j) < rows && column_of(j) < columns);
{% elif operation.bias != "none" %}
    const uint4 twos = staging.bias.read_eight(i);
    const uint32_t two[4] = {twos.x, twos.y, twos.z, twos.w};
    CUTE_UNROLL
    for (int j = 0; j < 8; ++j) eight.bias[j] = two[j / 2];
{% endif %}
{% if operation.masked %}
    staging.shown.read_bytes(eight.shown, i);
{% endif %}
    return eight;
  }
{% endif %}
{% if leans %}

  // Whether the diagonal leaves all of a warp's tile on one side: then add<true> leaves out what a row's scores have
  // in common, which is offset(). `place` is from the tile's first column to where the warp's first row stands.
  __device__ __forceinline__ bool leans(int place) {
    if (place <= 1 - kWarpRows) slope = -slope;
    return place <= 1 - kWarpRows || place >= kKvTile - 1;
  }
  __device__ __forceinline__ float offset(int i) const { return slope * (distance + row_of(i)); }

  template <bool kLeans>
{% endif %}
{% if operation.bias != "none" %}

  // What is added to the score of accumulator i.
  __device__ __forceinline__ float term(int i, const Eight& eight) const {
{% if operation.bias == "fp32" %}
    const float bias = __uint_as_float(eight.bias[i % 8]);
{% else %}
    const uint32_t two = eight.bias[i % 8];
    const float bias = float(BiasElement::bitcast(uint16_t(i % 2 ? two >> 16 : two)));
{% endif %}
    return {{ added("bias") }};
  }
{% elif leans %}
  __device__ __forceinline__ float add(int i, float x) const {
    return fmaf(kLeans ? -slope : slope, kLeans ? column_of(i) : fabsf(distance + (row_of(i) - column_of(i))), x);
  }
{% elif adds %}

  __device__ __forceinline__ float add(int i, float x) const { return {{ added("x") }}; }
{% endif %}
{% if operation.masked %}

  __device__ __forceinline__ bool hides(int i, const Eight& eight) const { return eight.shown[i % 8] == 0; }
{% endif %}
};
