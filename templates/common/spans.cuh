// Whether two fp16 pieces hold the values of A and B, as the launches that made them counted. Either no value
// lost bits, or each dot product has at least as many terms of two large values as it has with a lost one.
__device__ __forceinline__ bool pieces_hold(const Parameters& p) {
  // From L2: the launch that wrote them may have ended after this one began.
  const uint4 a = __ldcg(reinterpret_cast<const uint4*>(p.span_a));
  const uint4 b = __ldcg(reinterpret_cast<const uint4*>(p.span_b));
  return (a.y | b.y) == 0 || uint64_t(a.x) + b.x <= a.z;
}
