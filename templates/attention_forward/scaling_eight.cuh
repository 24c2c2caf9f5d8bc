// A score is a product of q and k times their scales{{ ", and its tanh where it is capped" if capped }}.
{% set blocks = operation.scales == "blocks" %}
struct Scaling {
{% if blocks %}
  float of_row[2];  // what the thread's rows are multiplied by
  float of_tile;    // what the tile's columns are
  const float* of_tiles;
{% elif capped %}
  float argument;  // of a product in the argument of tanh
{% endif %}
{% if capped or not blocks %}
  float exponent;  // the factor of {{ "a tanh" if capped else "a product" }} in the argument of exp2
{% endif %}

{% if capped %}
  __device__ __forceinline__ explicit Scaling(const Parameters& p) { exponent = p.softcap * kLog2E; }
{% endif %}
  // For the rows `row` and 8 below of a sequence and head.
  __device__ __forceinline__ void begin(const Parameters& p, const Sequence& sequence, int head, int row) {
    const float scale = {{ "__fdividef(p.scale, p.softcap)" if capped else "p.scale * kLog2E" }};
{% if blocks %}
    const int64_t batch = {{ number }}, kv_head = head / p.sharing;
    const float* of_rows = p.q_descale + batch * p.q_descale_batch + head / p.q_descale_sharing * p.q_descale_head;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      of_row[r] = scale * of_rows[min(row + 8 * r, sequence.rows(p) - 1) * p.q_descale_row];
    }
    of_tiles = p.k_descale + batch * p.k_descale_batch + kv_head * p.k_descale_head;
{% else %}
    const int64_t batch = {{ number }}, kv_head = head / p.sharing;
    const float factor = scale * p.q_descale[batch * p.q_descale_batch + kv_head * p.q_descale_head] *
                         p.k_descale[batch * p.k_descale_batch + kv_head * p.k_descale_head];
    {{ "argument = factor" if capped else "exponent = above_zero(factor)" }};
{% endif %}
  }
{% if blocks %}
  // Reads the scale of the columns of tile n.
  __device__ __forceinline__ void read(const Parameters& p, int n) {
    of_tile = of_tiles[n * kKvTile / {{ keys_of_a_scale }} * p.k_descale_block];
  }
{% endif %}
{% if not capped %}
  // A masked score, -inf, must not become NaN where a scale is 0.
  __device__ __forceinline__ static float above_zero(float factor) { return factor == 0 ? 0x1p-126f : factor; }
{% endif %}
  // Of a score of the thread's row r in the argument of exp2.
  __device__ __forceinline__ float factor({{ "int r" if blocks and not capped else "int" }}) const {
    return {{ "above_zero(of_row[r] * of_tile)" if blocks and not capped else "exponent" }};
  }
{% if capped or operation.scores == "int8" %}
  __device__ __forceinline__ void cap(float (&scores)[kScores]) const {
{% if operation.scores == "int8" %}
    CUTE_UNROLL
    for (int i = 0; i < kScores; ++i) scores[i] = float(__float_as_int(scores[i]));
{% endif %}
{% if capped %}
    CUTE_UNROLL
    for (int i = 0; i < kScores; ++i)
      asm("tanh.approx.f32 %0, %1;" : "=f"(scores[i]) : "f"(scores[i] * {{ "(of_row[i / 2 % 2] * of_tile)" if blocks else "argument" }}));
{% endif %}
  }
{% endif %}
};
