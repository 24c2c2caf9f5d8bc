// dq = ds k: a warpgroup has 64 rows of q, and the columns of the head dimension or a part of them.
{% if shares_rows %}
// Issues the MMA over a CTA's rows of k; with kMore it is added to the one that was issued before.
template <bool kMore = false>
{% else %}
// Issues the MMA over the rows of k.
{% endif %}
__device__ __forceinline__ void multiply_query(float (&dq)[kQueries], uint64_t ds, uint64_t k, int consumer) {
  ds += consumer / kQuerySplits * kWgmmaM * 128 / 16;
  k += consumer % kQuerySplits * (kQueryN / kBoxColumns) * Tile<kKvRows>::kBoxBytes / 16;
  {% if shares_rows %}if (!kMore) {% endif %}fence(dq);
  cute::warpgroup_arrive();
  CUTE_UNROLL
  for (int step = 0; step < kKvRows / QueryWgmma::kK; ++step)
    QueryWgmma::fma(ds + (step / 4 * kDsBoxBytes + step % 4 * 32) / 16, k + step * QueryWgmma::kK * kSpan / 16,
                    dq, {% if shares_rows %}kMore || {% endif %}step > 0);
  cute::warpgroup_commit_batch();
}

// Takes the sums of a q tile apart: `take` gets (row, column, values of 8 columns). Of a fragment of 8
// columns lane l holds two of row l / 4, then two of the row 8 further down.
constexpr int kPieces = kPartSums / 16;
template <class Take> __device__ __forceinline__ void unpack(const float4* sums, int piece, Take&& take) {
  constexpr int kFragments = kQueryN / 8;
  // An octet has 8 rows and the 8 rows 8 further down.
  const int fragment = piece % (kColumns / 8), octet = piece / (kColumns / 8);
  const int warp = (octet / 32 * kQuerySplits + fragment / kFragments) * 4 + octet / 8 % 4;
  const int row = octet / 32 * kWgmmaM + octet / 8 % 4 * 16 + octet % 8;
  float values[2][8];
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) {
    const float4 four = sums[(warp * kFragments + fragment % kFragments) * 32 + octet % 8 * 4 + i];
    values[0][2 * i] = four.x, values[0][2 * i + 1] = four.y;
    values[1][2 * i] = four.z, values[1][2 * i + 1] = four.w;
  }
  take(row, fragment * 8, values[0]);
  take(row + 8, fragment * 8, values[1]);
}
