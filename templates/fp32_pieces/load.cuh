// Eight values of a row; those past the end are zeros.
__device__ __forceinline__ void load(float (&values)[kValues], const float* row, int column, int k, bool aligned) {
  if (aligned && column + kValues <= k) {
    const float4* const from = reinterpret_cast<const float4*>(row + column);
    const float4 first = from[0], second = from[1];
    values[0] = first.x, values[1] = first.y, values[2] = first.z, values[3] = first.w;
    values[4] = second.x, values[5] = second.y, values[6] = second.z, values[7] = second.w;
  } else {
    CUTE_UNROLL
    for (int i = 0; i < kValues; ++i) values[i] = column + i < k ? row[column + i] : 0.f;
  }
}
