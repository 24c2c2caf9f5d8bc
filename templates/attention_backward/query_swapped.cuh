// dq^T = k^T ds^T: a warpgroup has 64 rows of the head dimension, and the columns of q or a part of them.
{% if shares_rows %}
// Issues the MMA over a CTA's rows of k; with kMore it is added to the one that was issued before.
template <bool kMore = false>
{% else %}
// Issues the MMA over the rows of k.
{% endif %}
__device__ __forceinline__ void multiply_query(float (&dq)[kQueries], uint64_t ds, uint64_t k, int consumer) {
  ds += consumer % kQuerySplits * kQueryN * 128 / 16;
  k += consumer / kQuerySplits * (kWgmmaM / kBoxColumns) * Tile<kKvRows>::kBoxBytes / 16;
  {% if shares_rows %}if (!kMore) {% endif %}fence(dq);
  cute::warpgroup_arrive();
  CUTE_UNROLL
  for (int step = 0; step < kKvRows / QueryWgmma::kK; ++step)
    QueryWgmma::fma(k + step * QueryWgmma::kK * kSpan / 16, ds + (step / 4 * kDsBoxBytes + step % 4 * 32) / 16,
                    dq, {% if shares_rows %}kMore || {% endif %}step > 0);
  cute::warpgroup_commit_batch();
}

// Takes the sums of a q tile apart: `take` gets (row, column, values of 8 columns). Of a fragment of 8
// rows of q lane l holds two of column l / 4, then two of the column 8 further on.
constexpr int kPieces = kPartSums / 32;
template <class Take> __device__ __forceinline__ void unpack(const float4* sums, int piece, Take&& take) {
  constexpr int kFragments = kQueryN / 8;
  const int pair = piece % 4, columns = piece / 4 % (kColumns / 16), fragment = piece / 4 / (kColumns / 16);
  const int warp = (columns / 4 * kQuerySplits + fragment / kFragments) * 4 + columns % 4;
  float values[2][2][8];  // of rows, of columns further on
  CUTE_UNROLL
  for (int i = 0; i < 8; ++i) {
    const float4 four = sums[(warp * kFragments + fragment % kFragments) * 32 + i * 4 + pair];
    values[0][0][i] = four.x, values[1][0][i] = four.y;
    values[0][1][i] = four.z, values[1][1][i] = four.w;
  }
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) take(fragment * 8 + pair * 2 + i % 2, columns * 16 + i / 2 * 8, values[i % 2][i / 2]);
}
